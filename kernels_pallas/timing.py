"""Times on the device this process has: of an op's calls, of a copy, of dense products; and errors.

A call of a few microseconds cannot be timed by itself: starting a program costs more. So a program
holds a loop of many calls, and the time is the loop's over their number, the median of several
runs. Every call depends on the loop's last turn through its smallest operand, so that none is moved
out of the loop or left out; that takes one kernel of a few values a call, counted in (1 to 2 us in
a CUDA graph). Calls take turns with operands that together exceed the largest second-level cache,
since in a model 60 other layers run between two calls of one.
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.dispatch import Target
from kernels_pallas.registry import Op, Product

CACHE_BYTES = 256 << 20
"""Twice the largest second-level cache of a GPU the kernels run on (126 MiB, B200)."""

MOST_VARIANTS = 16
"""Calls in one turn of the loop: each is compiled."""

LEAST_CALLS = 32
"""Calls in one program, so that its start (about 20 us) is under a microsecond of each."""

COPIES = 8
"""In a program that measures the bandwidth."""

WARM_UPS = 3
"""The first run of a CUDA graph is not one, the second records it."""


class NoGpu(RuntimeError):
    """No GPU the kernels run on; the message says what was found and what is needed."""


def find_gpu() -> Any:
    """JAX's first device (a `jax.Device`), if kernels run on it.

    Raises:
        NoGpu: they do not.
    """
    needed = (
        "needed: an NVIDIA GPU of compute capability 8.0 or later with its driver, and JAX's CUDA "
        "plugin (pip install -e '.[cuda12]')"
    )
    try:
        device, *others = jax.devices()
    except RuntimeError as error:
        first = str(error).strip().splitlines()[0]
        raise NoGpu(f"JAX starts on no device ({first}); {needed}") from None
    target = Target.of(device)
    reason = target.obstacle()
    if reason is None:
        return device
    found = f"JAX found {1 + len(others)} x {device.device_kind}"
    if target.capability is not None:
        raise NoGpu(f"{found}, whose {reason}; {needed}")
    raise NoGpu(f"{found}, and no NVIDIA GPU; {needed}")


class Timing(NamedTuple):
    """Seconds of one call: median of the runs, and (largest - smallest) / median."""

    seconds: float
    spread: float
    calls: int
    runs: int


class Comparison(NamedTuple):
    """An op's outputs beside its reference's."""

    error: float
    """Largest difference of a floating-point output over that output's largest value."""
    mismatches: int
    """Values of integer outputs that differ."""
    is_finite: bool


def num_variants(num_bytes: int, most: int = MOST_VARIANTS) -> int:
    """Sets of operands of which one does not find itself in the cache when its turn comes."""
    return max(1, min(most, math.ceil(CACHE_BYTES / max(1, num_bytes))))


def seconds_per_call(
    function: Callable[..., Any], variants: Sequence[Sequence[Any]], *, repeats: int = 7,
    least_calls: int = LEAST_CALLS,
) -> Timing:  # fmt: skip
    """Time of `function(*operands)`, over the sets of operands in turn."""
    turns = math.ceil(least_calls / len(variants))
    run = jax.jit(chained(function, turns))
    variants = [tuple(operands) for operands in variants]
    token = jnp.zeros((), jnp.float32)

    def once() -> float:
        began = time.perf_counter()
        jax.block_until_ready(run(variants, token))
        return time.perf_counter() - began

    return summary([once() for _ in range(WARM_UPS + repeats)][WARM_UPS:], turns * len(variants))


def summary(seconds: Sequence[float], calls: int) -> Timing:
    """Of the times of whole programs of so many calls."""
    middle = statistics.median(seconds)
    return Timing(middle / calls, (max(seconds) - min(seconds)) / middle, calls, len(seconds))


def chained(function: Callable[..., Any], turns: int) -> Callable[..., jax.Array]:
    """`turns` turns of a loop, in each a call with every set of operands."""

    def run(variants: list[tuple], token: jax.Array) -> jax.Array:
        def turn(_: Any, token: jax.Array) -> jax.Array:
            outs = [function(*_tied(operands, token)) for operands in variants]
            # A barrier, or a product of which one value is used becomes that value's alone.
            return _one_value(jax.lax.optimization_barrier(outs))

        return jax.lax.fori_loop(0, turns, turn, token)

    return run


def _tied(operands: tuple, token: jax.Array) -> Any:
    """The operands, the smallest made to depend on the token without being changed by it."""
    leaves, tree = jax.tree.flatten(operands)
    i = min(range(len(leaves)), key=lambda i: leaves[i].nbytes)
    # No output of an op is this large; an unordered one (nan) is not larger either.
    leaves[i] = jnp.where(token > 1e38, jnp.zeros_like(leaves[i]), leaves[i])
    return jax.tree.unflatten(tree, leaves)


def _one_value(outs: Any) -> jax.Array:
    """A sum of every output's first value: none can be left out."""
    return sum(
        (out[(0,) * out.ndim].astype(jnp.float32) for out in jax.tree.leaves(outs)),
        start=jnp.zeros((), jnp.float32),
    )


def copy_bytes_per_second(num_bytes: int, repeats: int = 7) -> float:
    """Bytes read and written a second by a copy of so many bytes."""
    values = jnp.zeros((num_bytes // 4,), jnp.uint32)
    step = jax.jit(copied_over_and_over, donate_argnums=0)
    seconds = []
    for _ in range(WARM_UPS + repeats):
        began = time.perf_counter()
        values = jax.block_until_ready(step(values))
        seconds.append(time.perf_counter() - began)
    return 2 * values.nbytes / summary(seconds[WARM_UPS:], COPIES).seconds


def copied_over_and_over(values: jax.Array) -> jax.Array:
    """The values after `COPIES` passes over them."""

    def copy(_: Any, values: jax.Array) -> jax.Array:
        # Adding one is a copy that is not left out; with the barrier two of them do not become one.
        return jax.lax.optimization_barrier(values + jnp.uint32(1))

    return jax.lax.fori_loop(0, COPIES, copy, values)


def dense_seconds(
    products: Sequence[Product],
    *,
    most_bytes: int,
    most_variants: int = MOST_VARIANTS,
    repeats: int = 7,
    least_calls: int = LEAST_CALLS,
) -> Timing:
    """Time of these products in dense bfloat16, one after the other.

    Raises:
        ValueError: their weights do not fit into `most_bytes`.
    """
    num_bytes = sum(2 * p.batch * p.inputs * p.columns for p in products)
    if num_bytes > most_bytes:
        raise ValueError(
            f"{num_bytes / 1e9:.1f} GB of dense weights, over the {most_bytes / 1e9:.1f} allowed"
        )

    def draw(*shape: int) -> jax.Array:
        nonlocal count
        count += 1
        return jax.random.normal(jax.random.key(count, impl="rbg"), shape, jnp.bfloat16)

    count = 0
    copies = num_variants(num_bytes, min(most_variants, most_bytes // num_bytes))
    variants = [
        [(draw(p.batch, p.rows, p.inputs), draw(p.batch, p.inputs, p.columns)) for p in products]
        for _ in range(copies)
    ]

    def multiply(*pairs: tuple[jax.Array, jax.Array]) -> list[jax.Array]:
        return [jnp.matmul(x, w) for x, w in pairs]

    return seconds_per_call(multiply, variants, repeats=repeats, least_calls=least_calls)


def timed_variants(op: Op, spec: str, operands: Any, most: int = MOST_VARIANTS) -> list[Any]:
    """Sets of operands to time an op with, from those it was checked with."""
    sizes = op.specs[spec]
    first = op.variant(sizes, operands, 0)
    count = num_variants(op.bytes_read(sizes, first), most)
    return [first, *(op.variant(sizes, operands, seed) for seed in range(1, count))]


def expected_outputs(op: Op, spec: str, operands: Any) -> Any:
    """What the op's plain form gives in float32 on the same operands."""

    def plain(*operands: Any) -> Any:
        # Products of float32 operands are rounded on GPUs unless this is said.
        with jax.default_matmul_precision("highest"):
            return op.call(spec, jax.tree.map(widened, operands), "xla")

    return jax.tree.map(np.asarray, jax.jit(plain)(*operands))


def compare(
    op: Op, spec: str, operands: Any, implementation: Any, expected: Any = None
) -> Comparison:
    """An op's outputs beside `expected_outputs`, which are made where they are not given."""
    if expected is None:
        expected = expected_outputs(op, spec, operands)
    out = jax.jit(lambda *a: op.call(spec, a, implementation))(*operands)
    error, mismatches, is_finite = 0.0, 0, True
    for leaf, wanted in zip(jax.tree.leaves(out), jax.tree.leaves(expected), strict=True):
        got = np.asarray(leaf)
        if not jnp.issubdtype(got.dtype, jnp.floating):
            mismatches += int(np.sum(got != wanted))
            continue
        got, wanted = got.astype(np.float64), wanted.astype(np.float64)
        if not np.all(np.isfinite(got)):
            is_finite = False
            continue
        largest = float(np.max(np.abs(wanted))) or 1.0
        error = max(error, float(np.max(np.abs(got - wanted))) / largest)
    return Comparison(error, mismatches, is_finite)


def is_right(op: Op, spec: str, found: Comparison) -> bool:
    """Whether a comparison stays within the op's tolerance."""
    return found.is_finite and found.mismatches == 0 and found.error <= op.tolerance(spec)[0]


def widened(leaf: jax.Array) -> jax.Array:
    """Floating-point values in float32."""
    return leaf.astype(jnp.float32) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf
