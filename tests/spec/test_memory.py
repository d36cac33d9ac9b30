"""What a run holds, by hand, and what is said to fit where it does not."""

import dataclasses
import re

import jax.numpy as jnp
import pytest

from kimi_jax.config import ModelConfig
from kimi_jax.published import K25, K25_EAGLE3
from spec.eagle3.config import DrafterConfig
from spec.memory import MemoryShortage, Sizes, check_memory, fits, held, peak
from spec.traffic import drafter_bytes, target_bytes

# Of round numbers: a slot of 1100 bytes, no temporaries.
SIZES = Sizes(weights=10**9, drafter_weights=10**8, slot=1000.0, drafter_slot=100, width=0, slack=6)
CHANGES = {
    "--drafter none": SIZES.without_drafter(),
    "--cache sequence": dataclasses.replace(SIZES, slot=125.5),
}


def test_a_peak_by_hand():
    """250 and 6 are one capacity of 256; 1000 and 6 the second of 256 and 1024."""
    assert held(SIZES, 2, 256) == {
        "target_weight_bytes": 10**9,
        "drafter_weight_bytes": 10**8,
        "cache_bytes": 512_000,
        "drafter_cache_bytes": 51_200,
    }
    alone = peak(SIZES, 250, 1)
    assert alone["changing_cache_bytes"] == 0 and alone["cache_bytes"] == 256_000
    # A row of its own for the request that is to take one of four.
    assert peak(SIZES, 250, 4)["changing_cache_bytes"] == 256 * 1100
    # Of one row the old cache beside the new; of eight that is more than a row of the new.
    assert peak(SIZES, 1000, 1)["changing_cache_bytes"] == 256 * 1100
    assert peak(SIZES, 1000, 8)["changing_cache_bytes"] == 8 * 256 * 1100
    assert peak(SIZES, 1000, 8)["cache_bytes"] == 8 * 1024 * 1000


def test_kimi_k25_over_eight_devices():
    """As loading places it: 76.2 GB a device, 70 272 bytes a slot (61 layers of 576 values)."""
    cfg = ModelConfig.from_dict(K25)
    own = DrafterConfig.from_dict(K25_EAGLE3, num_target_layers=cfg.num_hidden_layers)
    dtype = jnp.dtype("bfloat16")
    target = target_bytes(cfg, 8, dtype)
    sizes = Sizes.of(cfg, target.resident, target, drafter_bytes(own, 8, dtype), slack=3)
    assert 76.1e9 < sizes.weights < 76.3e9 and sizes.slot == 70_272
    parts = check_memory(sizes, 97_900_000_000, max_length=4096, max_batch=8)
    # 4096 and 3 need a capacity of 4352; before it there is one of 1024.
    assert parts["cache_bytes"] == 8 * 4352 * 70_272
    assert parts["changing_cache_bytes"] == 8 * 1024 * (70_272 + sizes.drafter_slot)
    with pytest.raises(MemoryShortage, match="too little memory"):
        check_memory(sizes, 77_000_000_000, max_length=4096, max_batch=8)


def test_a_drafters_own_embedding_counts():
    own = DrafterConfig.from_dict(K25_EAGLE3, num_target_layers=61)
    dtype = jnp.dtype("bfloat16")
    without = drafter_bytes(own, 8, dtype)
    with_own = drafter_bytes(own, 8, dtype, has_own_embedding=True)
    assert with_own.resident > without.resident
    assert with_own.layer == without.layer and with_own.head == without.head


@pytest.mark.parametrize("memory", [1_100_900_000, 1_101_200_000, 1_103_000_000, 1_109_000_000])
def test_all_that_is_said_to_fit_fits_and_no_more_would(memory):
    with pytest.raises(MemoryShortage) as error:
        check_memory(SIZES, memory, max_length=1000, max_batch=8, changes=CHANGES)
    message = str(error.value)
    assert f"each has {memory / 1e9:.2f} GB" in message
    ways = message.partition("What would fit: ")[2].split("; or ")
    assert ways
    for way in ways:
        sizes = next((own for option, own in CHANGES.items() if option in way), SIZES)
        length = int(found[1]) if (found := re.search(r"--max-length (\d+)", way)) else 1000
        batch = int(found[1]) if (found := re.search(r"--max-batch (\d+)", way)) else 8
        assert fits(sizes, memory, length, batch)
        if "--max-length" in way:
            assert not fits(sizes, memory, length + 1, batch)
        elif "--max-batch" in way:
            assert not fits(sizes, memory, length, batch + 1)


def test_where_weights_alone_are_too_much_only_devices_help():
    def more():
        for count in (2, 4, 8):
            yield count, lambda count=count: Sizes(weights=4 * 10**9 // count, slot=1000.0, width=0)

    with pytest.raises(MemoryShortage, match="What would fit: 4 such devices$"):
        check_memory(
            Sizes(weights=4 * 10**9, slot=1000.0, width=0),
            1_500_000_000,
            max_length=1000,
            max_batch=2,
            more_devices=more(),
        )
    with pytest.raises(MemoryShortage, match="What would fit: nothing on these devices"):
        check_memory(SIZES, 5, max_length=1000, max_batch=2)
