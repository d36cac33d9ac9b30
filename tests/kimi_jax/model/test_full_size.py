"""Kimi-K2.5 at its published size, by shapes alone: seconds, and no memory."""

import math

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from kimi_jax.model.cache import LatentCache
from kimi_jax.model.moe import Int4Linear
from kimi_jax.model.transformer import Kimi, forward, logits
from kimi_jax.runtime.mesh import RULES

BF16 = jnp.dtype("bfloat16")


@pytest.fixture(scope="module")
def shapes_of(shape_rngs):
    def shapes_of(cfg) -> Kimi:
        return nnx.eval_shape(lambda: Kimi(cfg, dtype=BF16, rngs=shape_rngs()))

    return shapes_of


@pytest.fixture(scope="module")
def model(k25, shapes_of) -> Kimi:
    return shapes_of(k25)


def parameters(model: Kimi) -> dict[tuple, nnx.Variable]:
    return dict(nnx.to_flat_state(nnx.state(model, nnx.Param)))


def test_number_of_weights(model):
    """The published tensors' logical values; an INT4 byte holds two, its scales are none."""
    attention = (
        1536 * 7168  # q_a_proj
        + 1536  # q_a_layernorm
        + 12288 * 1536  # q_b_proj
        + 576 * 7168  # kv_a_proj_with_mqa
        + 512  # kv_a_layernorm
        + 16384 * 512  # kv_b_proj
        + 7168 * 8192  # o_proj
    )
    expert = 3 * 2048 * 7168
    moe = 384 * 7168 + 384 + 385 * expert  # router, its bias, 384 routed experts and the shared one
    outside = 2 * 163840 * 7168 + 7168  # embed_tokens and lm_head, the last norm
    expected = outside + 61 * (attention + 2 * 7168) + 3 * 18432 * 7168 + 60 * moe
    assert expected == 1_026_408_232_448

    counts = {"packed": 2, "scale": 0}
    found = sum(
        math.prod(p.shape) * counts.get(path[-1], 1) for path, p in parameters(model).items()
    )
    assert found == expected
    # One bfloat16 scale for 32 of the experts' values.
    scales = sum(math.prod(p.shape) for path, p in parameters(model).items() if path[-1] == "scale")
    assert scales == 60 * 384 * expert // 32


def test_bytes_of_the_weights(model):
    """Routed experts: 472.5 GiB of nibbles and 59.06 GiB of scales."""
    by_name: dict[str, int] = {}
    for path, p in parameters(model).items():
        name = path[-1] if path[-1] in ("packed", "scale") else "other"
        by_name[name] = by_name.get(name, 0) + math.prod(p.shape) * p.dtype.itemsize
    assert by_name["packed"] == 472.5 * 2**30
    assert by_name["scale"] == 59.0625 * 2**30


def test_layers(model):
    assert len(model.layers) == 61
    kinds = [isinstance(getattr(b.mlp, "experts", None), nnx.Module) for b in model.layers]
    assert kinds == [False] + [True] * 60
    assert isinstance(model.layers[60].mlp.experts.down_proj, Int4Linear)
    assert model.layers[1].mlp.e_score_correction_bias.dtype == jnp.float32


@pytest.mark.parametrize("name", ["k25", "plain", "int4", "tied, no shared expert"])
def test_axes_name_every_dimension(model, shapes_of, variants, name):
    """Of every parameter; and a mesh of 8 divides what the rules cut, at full size."""
    all_parameters = parameters(model if name == "k25" else shapes_of(variants[name]))
    for path, p in all_parameters.items():
        axes = p.get_metadata("axes").split()
        assert len(axes) == len(p.shape), path
        pspec = RULES.pspec(" ".join(axes))
        assert len(pspec) == len(p.shape), path
        if name == "k25":
            for size, mesh_axes in zip(p.shape, pspec, strict=True):
                assert mesh_axes is None or size % 8 == 0, path


def test_axes_letters_have_one_size_each(model, k25):
    sizes = {
        "D": {7168},
        "N": {64},
        "V": {163840},
        "U": {128},
        "H": {128},
        "Q": {1536},
        "C": {512},
        "UR": {192},
        "CR": {576},
        "E": {384},
        "E_all": {384},
        # Dense, shared and routed widths are all 'F'.
        "F": {18432, 2048},
    }
    for path, p in parameters(model).items():
        for i, (letter, size) in enumerate(
            zip(p.get_metadata("axes").split(), p.shape, strict=True)
        ):
            # Packed pairs and groups of 32 lie along the contracted axis, the second.
            divisor = {"packed": 2, "scale": 32}.get(path[-1], 1) if i == 1 else 1
            assert size * divisor in sizes[letter], (path, letter)


def test_a_decoding_step(model, k25):
    """Four tokens at the end of a full context: shapes and dtypes through all 61 layers."""

    def step(model, tokens):
        cache = LatentCache.empty(k25, 1, 262144, BF16)
        positions = 262140 + jnp.arange(4, dtype=jnp.int32)[None]
        out = forward(model, tokens, positions, cache, taps=(2, 30, 58))
        return out, logits(model, out.hidden[:, -1:])

    out, scores = jax.eval_shape(step, model, jax.ShapeDtypeStruct((1, 4), jnp.int32))
    assert scores.shape == (1, 1, 163840) and scores.dtype == jnp.float32
    assert [tap.shape for tap in out.taps] == [(1, 4, 7168)] * 3
    assert len(out.routing) == 60 and out.routing[0].expert_ids.shape == (4, 8)
    assert {layer.shape for layer in out.cache.layers} == {(262144, 576)}
