"""What a forward of the target or the drafter reads on one device, and what they take of memory.

Counted from the shapes of the very parameters and the one table that places them
(`kimi_jax.runtime.mesh`); nothing is allocated, and nothing here is a time.
"""

import collections
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, NamedSharding

from kimi_jax.axes import WHOLE
from kimi_jax.config import ModelConfig
from kimi_jax.model.cache import CACHE_AXES
from kimi_jax.model.transformer import Kimi
from kimi_jax.runtime.mesh import MESH_AXES, RULES
from spec.eagle3.config import DrafterConfig
from spec.eagle3.model import Eagle3, cache_axes, empty_cache
from spec.economics import Number

EMBEDDING = "embedding"
"""Held, but of it only the tokens' rows are read."""
EXPERTS = "routed experts"

_DRAFTER_PARTS = {"lm_head": "head", "draft_to_target": "map", "embed_tokens": EMBEDDING}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TargetBytes:
    """Bytes of the text model on one device."""

    read: Mapping[str, int]
    """By part, what every forward reads once, whatever its rows."""
    expert: int
    """One routed expert in each layer that has them."""
    resident: int
    """All weights."""
    slot: Number
    """A row's cache slot in every layer: whole on each device, or its share of it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrafterBytes:
    """Bytes of an EAGLE-3 drafter on one device; it lends the target's embedding."""

    layer: int
    """Its one layer, which every pass reads."""
    head: int
    """Read for every draft token."""
    fuse: int
    """What makes features of the target's streams: once a cycle."""
    resident: int
    slot: Number
    """A row's slot, or this device's part of it."""


def target_bytes(
    cfg: ModelConfig, devices: int, dtype: jnp.dtype, cache: str = "replicated"
) -> TargetBytes:
    """Of this model over `tensor=devices`, floating-point weights in this dtype."""
    dense, layers = min(cfg.first_k_dense_replace, cfg.num_hidden_layers), cfg.num_hidden_layers
    # Layers of a kind are alike: one of each is enough to look at.
    kinds = [count for count in (dense, layers - dense) if count]
    short = dataclasses.replace(
        cfg, num_hidden_layers=len(kinds), first_k_dense_replace=int(bool(dense))
    )
    held: collections.Counter[str] = collections.Counter()
    for path, num_bytes, is_whole in _parameters(
        lambda: Kimi(short, dtype=dtype, rngs=nnx.Rngs(0)), devices
    ):
        times = kinds[path[1]] if path[0] == "layers" else 1
        held[_part(path, is_whole=is_whole)] += times * num_bytes
    if cfg.tie_word_embeddings:
        held["head"] = held[EMBEDDING]
    resident = sum(held.values()) - (held["head"] if cfg.tie_word_embeddings else 0)
    experts = held.pop(EXPERTS, 0)
    held.pop(EMBEDDING)
    shares = devices if cache == "sequence" else 1
    return TargetBytes(
        read=dict(held),
        expert=experts // cfg.n_routed_experts,
        resident=resident,
        slot=layers * cfg.latent_width * dtype.itemsize / shares,
    )


def drafter_bytes(
    cfg: DrafterConfig,
    devices: int,
    dtype: jnp.dtype,
    *,
    has_own_embedding: bool = False,
    has_own_head: bool = True,
    cache: str = "replicated",
) -> DrafterBytes:
    """Of this drafter over `tensor=devices`, by default as the published Llama-style ones: with its
    own head, without its own embedding."""
    held: collections.Counter[str] = collections.Counter()
    for path, num_bytes, _ in _parameters(
        lambda: Eagle3(
            cfg,
            has_own_embedding=has_own_embedding,
            has_own_head=has_own_head,
            has_map=cfg.draft_vocab_size < cfg.vocab_size,
            dtype=dtype,
            rngs=nnx.Rngs(0),
        ),
        devices,
    ):
        part = _DRAFTER_PARTS.get(path[0], "layer")
        held["fuse" if path[0] in ("fc", "fc_norm", "input_norm") else part] += num_bytes
    slots = jax.eval_shape(lambda: empty_cache(cfg, 1, 1, dtype))
    # Latent rows of a cache in shares are cut by slots; this is one, which nothing cuts.
    shares = devices if cache == "sequence" else 1
    slot = sum(
        _on_device(leaf, axes, devices) / (shares if axes == CACHE_AXES else 1)
        for leaf, axes in zip(slots, cache_axes(cfg), strict=True)
    )
    return DrafterBytes(
        layer=held["layer"],
        head=held["head"],
        fuse=held["fuse"],
        resident=sum(held.values()),
        slot=slot,
    )


def _parameters(make: Callable[[], nnx.Module], devices: int) -> Iterator[tuple[tuple, int, bool]]:
    """Path, bytes on a device, and whether each device of several holds it whole."""
    _, state = nnx.split(nnx.eval_shape(make))
    for path, param in nnx.to_flat_state(state):
        value = param.get_value()
        num_bytes = _on_device(value, param.axes, devices)
        yield path, num_bytes, devices > 1 and num_bytes == value.size * value.dtype.itemsize


def _on_device(value: jax.ShapeDtypeStruct, axes: str, devices: int) -> int:
    rules = RULES if devices > 1 else WHOLE
    place = NamedSharding(AbstractMesh((1, devices), MESH_AXES), rules.pspec(axes))
    return math.prod(place.shard_shape(value.shape)) * value.dtype.itemsize


def _part(path: tuple, *, is_whole: bool) -> str:
    names = [str(name) for name in path]
    if names[0] != "layers":
        return {"embed_tokens": EMBEDDING}.get(names[0], "head")
    if "experts" in names:
        return EXPERTS
    if "shared_experts" in names:
        return "shared experts"
    if "self_attn" in names:
        return "attention kept whole" if is_whole else "attention"
    if names[2] == "mlp":
        return "router" if names[3] in ("gate", "e_score_correction_bias") else "dense layers"
    return "norms"
