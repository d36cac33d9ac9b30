"""Machines of every kind, described: what is refused, and what it is told to do."""

import jax
import pytest

from kimi_jax.runtime import machine
from kimi_jax.runtime.machine import (
    Device,
    Gpus,
    check_alike,
    check_count,
    check_gpus_are_used,
    devices_of,
    wants_cpu,
)
from kimi_jax.runtime.mesh import MeshError

PRO = Device(kind="NVIDIA RTX PRO 6000", platform="gpu", memory_bytes=97_900_000_000)
H100 = Device(kind="NVIDIA H100", platform="gpu", memory_bytes=75_000_000_000)


def gpus(driver: str | None = "580.82.07", plugin: str | None = "jax-cuda13-plugin") -> Gpus:
    return Gpus(names=("NVIDIA RTX PRO 6000",) * 8, driver=driver, plugin=plugin)


def test_machines_that_are_as_they_should_be():
    check_gpus_are_used(gpus(), "gpu")
    check_gpus_are_used(Gpus(names=(), driver=None, plugin="jax-cuda13-plugin"), "cpu")
    check_count([PRO] * 8, 8)
    # XLA takes a share of what is free, which is never quite the same.
    nearly = Device(kind=PRO.kind, platform="gpu", memory_bytes=97_100_000_000)
    check_alike([PRO, nearly] * 4)
    check_alike([Device(kind="cpu", platform="cpu", memory_bytes=None)] * 8)


@pytest.mark.parametrize(
    "found, message",
    [
        (gpus(driver=None), "8 NVIDIA GPU.*driver does not answer.*install driver 580 or newer"),
        (gpus(plugin=None), r'plugin is not installed; pip install "kimi-jax\[cuda13\]"'),
        (gpus("550.54.15", None), r'pip install "kimi-jax\[cuda12\]" \(driver 550.54.15\)'),
        (gpus(), "jax-cuda13-plugin found no usable GPU with driver 580.82.07"),
        (gpus("550.54.15"), "the extra for this driver is cuda12"),
    ],
)
def test_gpus_that_jax_does_not_see(found, message):
    with pytest.raises(MeshError, match=message) as error:
        check_gpus_are_used(found, "cpu")
    assert "--platform cpu runs without them" in str(error.value)


@pytest.mark.parametrize(
    "device, message",
    [
        (PRO, "needs 8 devices, 4 gpu found .*--mesh tensor=4 takes those; CUDA_VISIBLE_DEVICES"),
        (
            Device(kind="cpu", platform="cpu", memory_bytes=None),
            "needs 8 devices, 4 cpu found.*device_count=8 simulates them",
        ),
    ],
)
def test_too_few_devices(device, message):
    with pytest.raises(MeshError, match=message):
        check_count([device] * 4, 8)


def test_mixed_devices():
    with pytest.raises(MeshError, match="mixes devices") as error:
        check_alike([PRO, H100, PRO, PRO])
    assert "0, 2, 3: NVIDIA RTX PRO 6000 with 97.9 GB; 1: NVIDIA H100" in str(error.value)
    assert "CUDA_VISIBLE_DEVICES=0,2,3" in str(error.value)
    small = Device(kind=PRO.kind, platform="gpu", memory_bytes=48_000_000_000)
    with pytest.raises(MeshError, match="0: .* with 97.9 GB; 1: .* with 48.0 GB"):
        check_alike([PRO, small])


def test_simulated_devices_share_the_memory_that_is_available(monkeypatch):
    monkeypatch.setattr(machine, "available_memory", lambda: 24_000_000_000)
    found = devices_of(jax.devices()[:8])
    assert found == [Device(kind="cpu", platform="cpu", memory_bytes=3_000_000_000)] * 8
    assert machine.used_memory(jax.devices()) is None
    monkeypatch.undo()
    assert machine.available_memory() > 1e8


def test_what_the_system_says_of_gpus(monkeypatch):
    answers = {"nvidia-smi": ["NVIDIA H100 80GB HBM3, 570.86.15"] * 2}
    monkeypatch.setattr(machine, "_lines", lambda *command: answers.get(command[0], []))
    found = machine.find_gpus()
    assert found.names == ("NVIDIA H100 80GB HBM3",) * 2 and found.driver == "570.86.15"
    # Without its driver the bus still tells; a GPU's audio device is none.
    answers.clear()
    answers["lspci"] = [
        "01:00.0 VGA compatible controller: NVIDIA Corporation GB202GL [RTX PRO 6000] (rev a1)",
        "01:00.1 Audio device: NVIDIA Corporation GB202 High Definition Audio Controller",
        "02:00.0 VGA compatible controller: ASPEED Technology, Inc.",
    ]
    found = machine.find_gpus()
    assert found.names == ("NVIDIA Corporation GB202GL [RTX PRO 6000] (rev a1)",)
    assert found.driver is None


def test_the_cpu_can_be_asked_for(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert wants_cpu(None) and wants_cpu("cpu") and not wants_cpu("gpu")
    monkeypatch.delenv("JAX_PLATFORMS")
    assert wants_cpu("cpu") and not wants_cpu(None)
