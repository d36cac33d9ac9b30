"""Every op that has a kernel, for what goes over all of them: the GPU check, the tuner.

An op is a function of a named shape's operands and of `implementation`. A spec of `arg_specs.SPECS`
has `shapes()`, `operands(seed)` and, where calls need keyword arguments, `options`. Adding an op is
a line in `OPS`; what it does not say about its cost is taken from the operands (`Op`).
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas import dispatch
from kernels_pallas.grouped_matmul import arg_specs as expert_specs
from kernels_pallas.grouped_matmul import expert_ffn
from kernels_pallas.mla_attention import arg_specs as mla_specs
from kernels_pallas.mla_attention import mla_attention_with_lse
from kernels_pallas.mla_inputs import arg_specs as inputs_specs
from kernels_pallas.mla_inputs import mla_inputs
from kernels_pallas.norm_linear import arg_specs as linear_specs
from kernels_pallas.norm_linear import norm_linear
from kernels_pallas.router import arg_specs as router_specs
from kernels_pallas.router import choose_experts

TOLERANCES = {
    "float32": (1e-5, "float32 products and sums in another order"),
    "bfloat16": (2e-2, "intermediate values rounded to bfloat16 (2^-9 each), sums in float32"),
}
"""Most error of an op relative to its largest value, against its reference in float32, and why."""


class Product(NamedTuple):
    """`batch` dense products of [rows, inputs] with [inputs, columns]."""

    batch: int
    rows: int
    inputs: int
    columns: int

    @property
    def flops(self) -> int:
        """A multiplication and an addition for each weight and row."""
        return 2 * self.batch * self.rows * self.inputs * self.columns


def all_bytes(spec: Any, operands: Any) -> int:
    """Every operand is read once."""
    del spec
    return sum(leaf.nbytes for leaf in jax.tree.leaves(operands))


def products_of_weights(spec: Any, operands: Any) -> list[Product]:
    """The first operand's rows times every operand of two axes or more that is not shaped like it.

    Of weights with more axes the size is right, the shape is not that of the op's own product.
    """
    del spec
    first, *others = jax.tree.leaves(operands)
    rows = math.prod(first.shape[:2] if first.ndim > 2 else first.shape[:1])
    weights = [w for w in others if w.ndim > 1 and w.shape != first.shape]
    weights = [w for w in weights if jnp.issubdtype(w.dtype, jnp.floating)]
    return [Product(1, rows, w.shape[0], math.prod(w.shape[1:])) for w in weights]


def copied(spec: Any, operands: Any, seed: int) -> Any:
    """The same values in other places of the device's memory."""
    del spec, seed
    return jax.tree.map(jnp.copy, operands)


@dataclasses.dataclass(frozen=True)
class Op:
    """An op, its named shapes, and what a call of one must do at the least."""

    function: Callable[..., Any]
    specs: Mapping[str, Any]
    variant: Callable[[Any, Any, int], Any] = copied
    """Operands of the op's usual cost that read other memory than those of another seed.

    From the spec, operands on the device, and the seed.
    """
    bytes_read: Callable[[Any, Any], int] = all_bytes
    products: Callable[[Any, Any], list[Product]] = products_of_weights
    """The same work in dense bfloat16."""

    def call(self, spec: str, operands: Any, implementation: dispatch.Implementation | None) -> Any:
        """The op on a named shape's operands."""
        options = getattr(self.specs[spec], "options", {})
        return self.function(*operands, **options, implementation=implementation)

    def tolerance(self, spec: str) -> tuple[float, str]:
        """Of the spec's dtype (float32 where it has none), and its reason."""
        return TOLERANCES[getattr(self.specs[spec], "dtype", "float32")]


def _attend(
    q_latent: Any, q_rope: Any, cache: Any, last: Any, tree_mask: Any = None, *,
    implementation: dispatch.Implementation | None,
) -> Any:  # fmt: skip
    scale = (q_latent.shape[-1] + q_rope.shape[-1]) ** -0.5
    return mla_attention_with_lse(
        q_latent,
        q_rope,
        cache,
        last,
        scale=scale,
        tree_mask=tree_mask,
        implementation=implementation,
    )


def _full_cache(spec: mla_specs.MlaSpec, operands: Any, seed: int) -> Any:
    """The same queries at the end of a text that fills the cache."""
    del seed
    q_latent, q_rope, cache, last, *mask = operands
    before = spec.S - max(spec.T, spec.X)
    ends = before - 1 if spec.X else before + np.arange(spec.T)
    ends = jnp.array(np.broadcast_to(ends, last.shape), last.dtype)
    return *jax.tree.map(jnp.copy, (q_latent, q_rope, cache)), ends, *map(jnp.copy, mask)


def _attention_products(spec: mla_specs.MlaSpec, operands: Any) -> list[Product]:
    del operands
    rows, width = spec.T * spec.N, spec.C + spec.R
    return [Product(spec.B, rows, width, spec.S), Product(spec.B, rows, spec.S, spec.C)]


def _other_experts(spec: expert_specs.ExpertSpec, operands: Any, seed: int) -> Any:
    """The same tokens and weights with other distinct experts a token."""
    x, experts, ids, combine, shared = operands
    rng = np.random.default_rng(seed)
    choices = np.stack([rng.permutation(spec.E)[: spec.A] for _ in range(spec.T)])
    shared = jax.tree.map(jnp.copy, shared)
    return jnp.copy(x), experts, jnp.array(choices, ids.dtype), combine, shared


def _num_used(operands: Any) -> int:
    return len(np.unique(np.asarray(operands[2])))


def _expert_bytes(spec: expert_specs.ExpertSpec, operands: Any) -> int:
    x, experts, ids, combine, shared = operands
    whole = all_bytes(spec, (x, ids, combine, shared))
    return whole + _num_used(operands) * all_bytes(spec, experts) // spec.E


def _expert_products(spec: expert_specs.ExpertSpec, operands: Any) -> list[Product]:
    """Each expert in use over all the tokens, or over its own where that is less."""
    used = _num_used(operands)
    rows = min(spec.T, -(-spec.T * spec.A // used))
    products = [Product(used, rows, spec.D, 2 * spec.F), Product(used, rows, spec.F, spec.D)]
    return products + [Product(1, spec.T, spec.shared, spec.D)] * bool(spec.shared)


def _small_cache(spec: inputs_specs.MlaInputsSpec, operands: Any, seed: int) -> Any:
    """The same with a cache of the new rows' slots: what is not given up is copied before a write.

    In the model the cache is given up and nothing is copied.
    """
    del seed
    *others, cache, start = jax.tree.map(jnp.copy, operands)
    return *others, cache[: spec.B * spec.T], jnp.zeros_like(start)


def _input_products(spec: inputs_specs.MlaInputsSpec, operands: Any) -> list[Product]:
    del operands
    return [Product(spec.N, spec.B * spec.T, spec.U, spec.C)]


OPS: dict[str, Op] = {
    "mla_attention": Op(
        _attend, mla_specs.SPECS, variant=_full_cache, products=_attention_products
    ),
    "expert_ffn": Op(
        expert_ffn,
        expert_specs.SPECS,
        variant=_other_experts,
        bytes_read=_expert_bytes,
        products=_expert_products,
    ),
    "norm_linear": Op(norm_linear, linear_specs.SPECS),
    "mla_inputs": Op(
        mla_inputs, inputs_specs.SPECS, variant=_small_cache, products=_input_products
    ),
    "choose_experts": Op(choose_experts, router_specs.SPECS),
}
