"""The training-time test: the drafter run on its own output, as many steps as it will draft.

EAGLE-3 (arXiv 2503.01840, section 3.2). Row i of step s holds the token at i + 1 + s, sits at
position i + s, and carries on from row i of the step before (from the target's streams at s = 0).
It attends to the first step's rows 0..i and to its own row of steps 1..s, in one softmax: what it
will find in the cache when, after the text up to token i + 1, it has drafted s tokens that stood.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kimi_jax.model import mla, rope
from kimi_jax.model.layers import linear
from spec.eagle3 import model as eagle3
from spec.eagle3.config import DrafterConfig
from spec.eagle3.model import Eagle3

ROW_BLOCK = 512
"""Places whose scores, or logits, are held at a time; bounds memory at long samples."""


class Heads(NamedTuple):
    """A step's queries, keys and values, heads first; N is a multiple of P."""

    q: Float[Array, "B N T X"]
    k: Float[Array, "B P T X"]
    v: Float[Array, "B P T H"]


class Seen(NamedTuple):
    """Keys and values of the steps so far."""

    keys: tuple[Float[Array, "B P T X"], ...] = ()
    values: tuple[Float[Array, "B P T H"], ...] = ()


def shift(x: Array, count: int) -> Array:
    """x moved `count` places to the left along axis 1, zeros at the end."""
    if count == 0:
        return x
    padding = [(0, 0)] * x.ndim
    padding[1] = (0, min(count, x.shape[1]))
    return jnp.pad(x[:, count:], padding)


def draft_step(
    model: Eagle3,
    cfg: DrafterConfig,
    feature: Float[Array, "B T D"],
    embedded: Float[Array, "B T D"],
    positions: Int[Array, "B T"],
    first: Int[Array, "B T"],
    seen: Seen,
) -> tuple[Float[Array, "B T D"], Seen]:
    """What every row carries on from this step, and what later steps see.

    Args:
        feature: the fused streams at the first step, then what the step before carried.
        embedded: of the token each row holds at this step.
        positions: of the rows at the first step.
        first: the place where each row's sample begins.
        seen: of the steps before.
    """
    step = len(seen.keys)

    def attend(pair: Float[Array, "B T DD"]) -> tuple[Float[Array, "B T D"], Seen]:
        heads, scale = _heads(model, cfg, pair, positions + step)
        now = Seen((*seen.keys, heads.k), (*seen.values, heads.v))
        out = _attend(heads.q, now, first, scale)
        flat = out.swapaxes(1, 2).reshape(*pair.shape[:2], -1)
        o_proj = model.self_attn.o_proj[...]
        return linear(flat, o_proj.reshape(-1, o_proj.shape[-1])), now

    return eagle3.run_layer(model, cfg, feature, embedded, attend)


def _heads(
    model: Eagle3, cfg: DrafterConfig, x: Float[Array, "B T DD"], positions: Int[Array, "B T"]
) -> tuple[Heads, float]:
    """The heads, and the scale of their scores."""
    attn = model.self_attn
    if isinstance(attn, eagle3.LlamaAttention):
        q, k, v = eagle3.llama_heads(attn, cfg, x, positions)
        heads = Heads(*(part.swapaxes(1, 2) for part in (q, k, v)))
        return heads, cfg.head_dim**-0.5
    assert cfg.mla is not None
    angles = rope.cos_sin(positions, cfg.rope, cfg.mla.qk_rope_head_dim)
    projected = mla.project(attn, cfg.mla, mla.compress(attn, x), *angles)
    k, v = mla.expand(attn, cfg.mla, projected.rows)
    q = jnp.concatenate([projected.q_nope, projected.q_rope], axis=-1).swapaxes(1, 2)
    return Heads(q, k.swapaxes(2, 3), v), cfg.mla.softmax_scale


def _attend(
    q: Float[Array, "B N T X"], seen: Seen, first: Int[Array, "B T"], scale: float
) -> Float[Array, "B N T H"]:
    B, N, T, X = q.shape
    P = seen.keys[0].shape[1]
    grouped = q.reshape(B, P, N // P, T, X)
    places = jnp.arange(T, dtype=jnp.int32)
    k, v = seen.keys[0], seen.values[0]

    def block(start: jax.Array | int, count: int) -> Float[Array, "B P n t H"]:
        def cut(x: jax.Array, axis: int) -> jax.Array:
            return jax.lax.dynamic_slice_in_dim(x, start, count, axis)

        queries = cut(grouped, 3)
        mine = cut(places, 0)
        visible = (places <= mine[:, None]) & (places >= cut(first, 1)[:, :, None])
        scores_f32 = jnp.einsum("bpntx,bpsx->bpnts", queries, k, preferred_element_type=jnp.float32)
        parts = [jnp.where(visible[:, None, None], scores_f32, -jnp.inf)]
        # Of the later steps a row sees its own place alone.
        queries_f32 = queries.astype(jnp.float32)
        for own in seen.keys[1:]:
            keys_f32 = cut(own, 2)[:, :, None].astype(jnp.float32)
            parts.append(jnp.sum(queries_f32 * keys_f32, axis=-1, keepdims=True))
        weights_f32 = jax.nn.softmax(scale * jnp.concatenate(parts, axis=-1), axis=-1)
        weights = weights_f32.astype(q.dtype)
        out_f32 = jnp.einsum(
            "bpnts,bpsh->bpnth", weights[..., :T], v, preferred_element_type=jnp.float32
        )
        for i, own in enumerate(seen.values[1:]):
            share = weights_f32[..., T + i, None]
            out_f32 += share * cut(own, 2)[:, :, None].astype(jnp.float32)
        return out_f32.astype(q.dtype)

    if T <= ROW_BLOCK:
        out = block(0, T)
    else:
        if T % ROW_BLOCK:
            raise ValueError(f"{T} tokens a row are no multiple of the block of {ROW_BLOCK}")
        starts = jnp.arange(0, T, ROW_BLOCK, dtype=jnp.int32)
        rows = jax.lax.map(jax.checkpoint(lambda at: block(at, ROW_BLOCK)), starts)
        out = jnp.moveaxis(rows, 0, 3).reshape(*rows.shape[1:4], T, rows.shape[-1])
    return out.reshape(B, N, T, -1)


def valid_rows(
    generated: Bool[Array, "B T"], first: Int[Array, "B T"], num_steps: int
) -> list[Bool[Array, "B T"]]:
    """Rows trained on at each step: tokens i + 2 to i + 2 + s are all the target's own.

    Those are the drafts a cycle makes at row i, the last of a prompt included: they stand in one
    reply, or there is nothing to draft.
    """
    out = []
    standing = jnp.ones_like(generated)
    for s in range(num_steps):
        # Zeros come in at the end of a row, where a sample that begins at 0 would seem to go on.
        standing = standing & shift(generated, s + 2) & (shift(first, s + 2) == first)
        out.append(standing)
    return out
