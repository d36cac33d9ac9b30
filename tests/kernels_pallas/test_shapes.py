"""Operands that are no call of an op are refused, whichever implementation would run them."""

import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from kernels_pallas import shapes
from kernels_pallas.grouped_matmul import arg_specs as expert_specs
from kernels_pallas.grouped_matmul import expert_ffn
from kernels_pallas.mla_attention import arg_specs, mla_attention
from kernels_pallas.mla_inputs import arg_specs as input_specs
from kernels_pallas.mla_inputs import mla_inputs
from kernels_pallas.norm_linear import norm_linear
from kernels_pallas.router import Choosing, choose_experts
from kernels_pallas.shapes import ShapeError


@pytest.fixture(autouse=True)
def unchecked_annotations():
    """As outside tests, where annotations are for readers."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def test_sizes_are_bound_and_differences_named():
    x, y = np.zeros((2, 3)), np.zeros((3, 4))
    assert shapes.bind("op", x=(x, "B D"), y=(y, "D F"), z=None) == {"B": 2, "D": 3, "F": 4}
    with pytest.raises(ShapeError, match=r"op: y is \[3, 4\], expected B = 2 in \[B, F\]"):
        shapes.bind("op", x=(x, "B D"), y=(y, "B F"))
    with pytest.raises(ShapeError, match=r"op: x is \[2, 3\], expected axes \[B\]"):
        shapes.bind("op", x=(x, "B"))
    with pytest.raises(ShapeError, match="nothing to compute"):
        shapes.bind("op", x=(np.zeros((2, 0)), "B D"))


def change_attention(q, r, cache, last, mask, what):
    return {
        "a slot less": (q, r, cache[:-1], last, mask),
        "a wider cache": (q, r, np.pad(cache, ((0, 0), (0, 1))), last, mask),
        "fewer heads": (q, r[:, :, :1], cache, last, mask),
        "fewer tokens": (q, r[:, :1], cache, last, mask),
        "last of another batch": (q, r, cache, last[:1], mask),
        "a float last": (q, r, cache, last.astype(np.float32), mask),
        "a mask of fewer tokens": (q, r, cache, last, np.ones((2, 2, 4), bool)),
        "a mask of too many slots": (q, r, cache, last, np.ones((*last.shape, 1000), bool)),
        "no tokens": (q[:, :0], r[:, :0], cache, last[:, :0], mask),
    }[what]


@pytest.mark.parametrize("implementation", ["xla", "interpret"])
@pytest.mark.parametrize(
    "what, said",
    [
        ("a slot less", "a cache of 2 rows"),
        ("a wider cache", "wide, C [+] R"),
        ("fewer heads", "q_rope is .* expected N ="),
        ("fewer tokens", "q_rope is .* expected T ="),
        ("last of another batch", "last is .* expected B = 2"),
        ("a float last", "last is float32, expected integers"),
        ("a mask of fewer tokens", "tree_mask is .* expected T ="),
        ("a mask of too many slots", "a tree_mask of at most"),
        ("no tokens", "nothing to compute"),
    ],
)
def test_attention(implementation, what, said):
    spec = arg_specs.SPECS["tiny-verify"]
    operands = (*spec.operands()[:4], None)
    *arrays, mask = change_attention(*operands, what)
    with pytest.raises(ShapeError, match=said):
        mla_attention(*arrays, scale=0.1, tree_mask=mask, implementation=implementation)


def test_experts():
    operands = expert_specs.SPECS["tiny-step"].operands()
    x, experts, ids, combine, *rest = operands
    gate = experts.gate_proj
    for changed, said in (
        ((x[:, :-32], experts, ids, combine), "D = .* in gate_proj"),
        ((x, experts, ids[:-1], combine), "expert_ids is .* expected T ="),
        ((x, experts, ids, combine[:, :1]), "combine_f32 is .* expected A ="),
        ((x, experts, ids, combine.astype(jnp.bfloat16)), "combine_f32 as float32"),
        ((x, experts, ids.astype(np.float32), combine), "expert_ids is float32"),
        (
            (x, experts._replace(gate_proj=gate._replace(scale=gate.scale[:, :1])), ids, combine),
            "gate_proj.scale",
        ),
        (
            (x, experts._replace(gate_proj=gate._replace(packed=gate.packed.view(np.int8))), ids,
             combine),
            "gate_proj.packed as uint8",
        ),
        (
            (x, experts._replace(down_proj=type(gate)(*(a[:1] for a in experts.down_proj))), ids,
             combine),
            "E = .* in down_proj",
        ),
    ):  # fmt: skip
        with pytest.raises(ShapeError, match=said):
            expert_ffn(*changed, implementation="interpret")


def test_the_others():
    x, kernel = np.zeros((2, 16), np.float32), np.zeros((16, 8), np.float32)
    gain = np.ones(16, np.float32)
    with pytest.raises(ShapeError, match=r"kernels\[1\] is \[8, 8\], expected D = 16"):
        norm_linear(x, None, gain, (kernel, kernel[:8]), eps=1e-6)
    with pytest.raises(ShapeError, match="delta .*, as x"):
        norm_linear(x, x[:1], gain, (kernel,), eps=1e-6)
    with pytest.raises(ShapeError, match="x .*16"):
        norm_linear(x[:, :8], None, gain, (kernel,), eps=1e-6)
    with pytest.raises(ShapeError, match="bias_f32 is .* expected E = 16"):
        choose_experts(x, gain[:8], None, Choosing(2, 1, 1, True, 1.0))
    *arrays, start = input_specs.SPECS["tiny-verify"].operands()
    with pytest.raises(ShapeError, match="start is .* expected B = 3"):
        mla_inputs(*arrays, start[:2], eps=1e-6)
