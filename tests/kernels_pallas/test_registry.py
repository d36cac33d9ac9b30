"""What is common to all ops that have a kernel."""

import jax
import numpy as np
import pytest

from kernels_pallas import timing
from kernels_pallas.registry import OPS

TINY = [(op, spec) for op in OPS for spec in OPS[op].specs if spec.startswith("tiny")]


@pytest.mark.parametrize(("op", "spec"), TINY)
def test_every_op_has_an_expected_output_in_float32(op, spec):
    """Also of shapes that say which dtype comes out."""
    operands = OPS[op].specs[spec].operands()
    out = jax.tree.leaves(timing.expected_outputs(OPS[op], spec, operands))
    assert out and all(np.isfinite(leaf).all() for leaf in out)
