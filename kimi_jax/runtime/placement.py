"""Which parameters the model wants, of what dtype, and which part of each lies on which device.

Shapes alone: nothing is read or built, and the mesh may be one of devices that do not exist.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from kimi_jax.axes import WHOLE
from kimi_jax.checkpoint.converted import Converted, holds
from kimi_jax.checkpoint.reader import DTYPES
from kimi_jax.checkpoint.table import Plan
from kimi_jax.config import ModelConfig
from kimi_jax.model.transformer import Kimi
from kimi_jax.runtime.mesh import RULES

LARGE_MATRIX = 1 << 18
"""Values from which on reading a matrix takes longer than widening it: a core's own cache."""

# Matrices whose every use at run time is a product by `matmul_f32`.
_PRODUCTS_ALONE = frozenset(
    (
        *("q_a_proj", "kv_a_proj_with_mqa", "q_b_proj", "o_proj"),
        *("gate_proj", "up_proj", "down_proj", "lm_head"),
    )
)


@dataclasses.dataclass(frozen=True)
class AbstractModel:
    """A model without its weights: `wanted` is what loading needs, by path."""

    graph: Any
    state: Any
    wanted: dict[str, jax.ShapeDtypeStruct]

    def fill(self, params: dict[str, jax.Array]) -> Any:
        """The model's state with these arrays in it."""
        flat = [
            (path, param.replace(params[_dotted(path)]))
            for path, param in nnx.to_flat_state(self.state)
        ]
        return nnx.from_flat_state(flat)


def abstract_model(
    cfg: ModelConfig,
    mesh: Mesh | AbstractMesh,
    dtype: jnp.dtype,
    *,
    dtypes: Mapping[str, jnp.dtype] | None = None,
) -> AbstractModel:
    """The model of a configuration, cut over a mesh.

    Args:
        cfg: with a `quantization` if the experts are INT4 (`Plan.cfg`).
        mesh: of the axes in `runtime.mesh`; on one device nothing is cut.
        dtype: of weights that are not packed, but for the router's bias (float32).
        dtypes: of parameters that have another one (`kept_dtypes`), by path.
    """
    abstract = nnx.eval_shape(lambda: Kimi(cfg, dtype=dtype, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(abstract)
    rules = RULES if mesh.size > 1 else WHOLE
    dtypes = dtypes or {}
    wanted = {
        _dotted(path): jax.ShapeDtypeStruct(
            param.shape,
            dtypes.get(_dotted(path), param.dtype),
            sharding=NamedSharding(mesh, rules.pspec(param.axes)),
        )
        for path, param in nnx.to_flat_state(state)
    }
    return AbstractModel(graph, state, wanted)


def kept_dtypes(plan: Plan | Converted, dtype: jnp.dtype, *, platform: str) -> dict[str, jnp.dtype]:
    """Parameters that keep the dtype they have in the files, where that is narrower than `dtype`.

    Nothing is rounded by it. The embedding's rows are widened after the look-up, unless it is the
    head too. On a CPU, which computes in float32, large bfloat16 matrices are widened inside their
    products (`matmul_f32`): half the memory to hold and to read. What else reads its weights is
    not: INT4 scales, the heads' maps of latents, and a drafter's own.
    """
    kept = {}
    for path, row in plan.parameters.items():
        name = path.rsplit(".", 1)[-1]
        stored = stored_dtype(plan, path) if row.kind == "float" else jnp.dtype(dtype)
        if stored.itemsize >= jnp.dtype(dtype).itemsize or not holds(dtype, stored):
            continue
        is_embedding = path == "embed_tokens" and not plan.cfg.tie_word_embeddings
        is_matrix = name in _PRODUCTS_ALONE and ".experts." not in path
        is_large = math.prod(row.shape) >= LARGE_MATRIX
        is_widened = platform == "cpu" and is_matrix and is_large and stored == jnp.bfloat16
        if is_embedding or is_widened:
            kept[path] = stored
    return kept


def stored_dtype(plan: Plan | Converted, path: str) -> jnp.dtype:
    """The dtype a parameter has in the files."""
    if isinstance(plan, Converted):
        return jnp.dtype(plan.stored[path].dtype)
    name = plan.file_names[plan.parameters[path].name_of(0)]
    return jnp.dtype(DTYPES[plan.files.tensors[name].dtype])


def bytes_per_device(wanted: dict[str, jax.ShapeDtypeStruct]) -> int:
    """Bytes of weights on each device: every device holds as much as any other."""
    total = 0
    for leaf in wanted.values():
        shape = leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)
        total += math.prod(shape) * leaf.dtype.itemsize
    return total


def _dotted(path: tuple) -> str:
    return ".".join(map(str, path))
