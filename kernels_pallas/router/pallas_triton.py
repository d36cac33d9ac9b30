"""`choose_experts` in one launch: a block a token, the best score taken out again and again.

XLA's top-k of a few hundred scores is a sort, with two launches before it and one after.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Bool, Float

from kernels_pallas.kernel_ops import next_power_of_two
from kernels_pallas.router.reference import Choosing, Routing


def obstacle(choosing: Choosing) -> str | None:
    """Why the kernel cannot choose this way; None if it can."""
    if choosing.n_group != 1:
        return f"experts are chosen in {choosing.n_group} groups, and the kernel knows one"
    return None


@functools.partial(jax.jit, static_argnames=("choosing", "interpret"))
def choose_experts(
    logits_f32: Float[Array, "T E"],
    bias_f32: Float[Array, " E"],
    is_real: Bool[Array, " T"] | None,
    choosing: Choosing,
    *,
    interpret: bool = False,
) -> Routing:
    """What the reference of this name says, where there is no `obstacle`."""
    T = logits_f32.shape[0]
    shape = (T, choosing.num_experts_per_tok)
    real = [] if is_real is None else [is_real]
    ids, combine_f32 = pl.pallas_call(
        functools.partial(_kernel, choosing=choosing),
        out_shape=(
            jax.ShapeDtypeStruct(shape, jnp.int32),
            jax.ShapeDtypeStruct(shape, jnp.float32),
        ),
        grid=(T,),
        compiler_params=plgpu.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
        name="choose_experts",
    )(logits_f32, bias_f32, *real)
    return Routing(ids, combine_f32)


def _kernel(logits_ref, bias_ref, *refs, choosing):
    *real_refs, ids_ref, combine_ref = refs
    token = pl.program_id(0)
    num_experts = logits_ref.shape[1]
    width = next_power_of_two(num_experts)
    expert = token * 0 + jnp.arange(width, dtype=jnp.int32)
    all_of = pl.ds(token * 0, width)
    is_expert = expert < num_experts
    scores = jax.nn.sigmoid(plgpu.load(logits_ref.at[token, all_of], mask=is_expert, other=0.0))
    choice = scores + plgpu.load(bias_ref.at[all_of], mask=is_expert, other=0.0)
    choice = jnp.where(is_expert, choice, -jnp.inf)
    chosen, shares = [], []
    for _ in range(choosing.num_experts_per_tok):
        best = jnp.min(jnp.where(choice == jnp.max(choice), expert, width))
        chosen.append(best)
        shares.append(jnp.sum(jnp.where(expert == best, scores, 0.0)))
        choice = jnp.where(expert == best, -jnp.inf, choice)
    total = sum(shares) + 1e-20 if choosing.norm_topk_prob else 1.0
    for place, (best, share) in enumerate(zip(chosen, shares, strict=True)):
        for ref in real_refs:
            best = jnp.where(ref[token], best, -1)
        ids_ref[token, place] = best
        combine_ref[token, place] = share / total * choosing.routed_scaling_factor
