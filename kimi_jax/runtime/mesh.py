"""The device mesh, and the one table that says which axis letter is cut over which mesh axis.

Two mesh axes. `tensor` cuts heads, feed-forward widths and the vocabulary; `expert` cuts the routed
experts. Outside the experts both serve together, so `expert=8` still cuts attention over 8 devices.
"""

from collections.abc import Mapping

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from kernels_pallas.grouped_matmul.layout import GROUP_SIZE
from kimi_jax.axes import WHOLE, Rules
from kimi_jax.config import ModelConfig
from kimi_jax.model.attention import KEY_BLOCK

MESH_AXES = ("expert", "tensor")

RULES = Rules.of(
    {
        "N": ("expert", "tensor"),
        "V": ("expert", "tensor"),
        "F": ("expert", "tensor"),
        "P": ("expert", "tensor"),
        "W": ("expert", "tensor"),
        "E": ("expert",),
    }
)

CACHES = ("replicated", "sequence")
"""Where the latent cache lies: whole on every device, or its slots shared out."""


class MeshError(ValueError):
    """A mesh this machine or this model cannot have; the message says what would work."""


def parse_mesh(text: str) -> dict[str, int]:
    """Sizes from "tensor=8" or "expert=4,tensor=2".

    Raises:
        MeshError: another form.
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = part.strip().partition("=")
        if name not in MESH_AXES or not size.isdecimal() or int(size) < 1 or name in sizes:
            raise MeshError(f"mesh {text!r}: expected e.g. 'tensor=8' or 'expert=4,tensor=2'")
        sizes[name] = int(size)
    return sizes


def make_mesh(sizes: Mapping[str, int] | None, platform: str | None = None) -> Mesh:
    """A mesh over the first devices of the platform; None takes one device.

    Raises:
        MeshError: unknown axes, no such platform, or more devices than there are.
    """
    sizes = dict(sizes or {})
    unknown = sorted(set(sizes) - set(MESH_AXES))
    if unknown:
        raise MeshError(f"mesh axes {unknown} are unknown; there are {', '.join(MESH_AXES)}")
    shape = tuple(sizes.get(axis, 1) for axis in MESH_AXES)
    if min(shape) < 1:
        raise MeshError(f"mesh {sizes}: sizes start at 1")
    try:
        devices = jax.devices(platform)
    except RuntimeError as error:
        raise MeshError(f"no {platform} device: {error}") from None
    wanted = int(np.prod(shape))
    if wanted > len(devices):
        kind = devices[0].platform
        hint = (
            f"; for CPU devices set XLA_FLAGS=--xla_force_host_platform_device_count={wanted} "
            "before JAX starts"
            if kind == "cpu"
            else ""
        )
        raise MeshError(f"mesh {sizes} needs {wanted} devices, {len(devices)} {kind} found{hint}")
    return Mesh(np.array(devices[:wanted]).reshape(shape), MESH_AXES)


def rules_for(mesh: Mesh | AbstractMesh, cache: str = "replicated") -> Rules:
    """The table for this mesh; on one device nothing is cut.

    With `cache` "sequence" the latent cache's slots are, over all devices.
    """
    if mesh.size == 1:
        return WHOLE
    return RULES if cache == "replicated" else Rules((*RULES.table, ("S", MESH_AXES)))


def check_cache(cache: str, mesh: Mesh | AbstractMesh) -> None:
    """Refuses a placement of the cache that this mesh cannot have.

    Raises:
        MeshError: says why.
    """
    if cache not in CACHES:
        raise MeshError(f"cache is {cache!r}, expected one of {', '.join(CACHES)}")
    if cache == "replicated":
        return
    if mesh.size == 1:
        raise MeshError("cache 'sequence' shares slots out over devices, and the mesh has one")
    if KEY_BLOCK % mesh.size:
        raise MeshError(
            f"cache 'sequence' over {mesh.size} devices: expected a number that divides {KEY_BLOCK}"
        )


def check_sizes(cfg: ModelConfig, mesh: Mesh | AbstractMesh) -> None:
    """Refuses a mesh that does not divide the model.

    Raises:
        MeshError: names every size that does not divide, and the device counts that work.
    """
    expert, tensor = mesh.shape["expert"], mesh.shape["tensor"]
    if _problems(cfg, expert, tensor):
        total = expert * tensor
        counts = range(1, max(total, 8) + 1)
        working = [f"tensor={n}" for n in counts if not _problems(cfg, 1, n)]
        working += [f"expert={n}" for n in counts if n > 1 and not _problems(cfg, n, 1)]
        raise MeshError(
            f"mesh expert={expert},tensor={tensor} does not divide this model: "
            + "; ".join(_problems(cfg, expert, tensor))
            + f". Meshes that work: {', '.join(working)}"
        )


def _problems(cfg: ModelConfig, expert: int, tensor: int) -> list[str]:
    total = expert * tensor
    shared = cfg.moe_intermediate_size * cfg.n_shared_experts
    dense = cfg.intermediate_size if cfg.first_k_dense_replace else 0
    # INT4 weights of down_proj are cut along their inputs, between groups of 32.
    unit = GROUP_SIZE if cfg.quantization is not None else 1
    checks = [
        ("num_attention_heads", cfg.num_attention_heads, total),
        ("vocab_size", cfg.vocab_size, total),
        ("intermediate_size", dense, total),
        ("moe_intermediate_size * n_shared_experts", shared, total),
        ("n_routed_experts", cfg.n_routed_experts, expert),
    ]
    found = [f"{name} {size} over {n}" for name, size, n in checks if size % n]
    if cfg.moe_intermediate_size % (tensor * unit):
        within = f" in groups of {unit}" if unit > 1 else ""
        found.append(f"moe_intermediate_size {cfg.moe_intermediate_size} over {tensor}{within}")
    return found
