"""What training takes from the target: its two vocabulary matrices and its hidden states.

States come from the target itself as it runs, and nothing is stored; or from files, and of the
target only the two matrices are loaded.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from kimi_jax.checkpoint.load import load_params, open_checkpoint
from kimi_jax.checkpoint.reader import resolve
from kimi_jax.config import ModelConfig
from kimi_jax.model import transformer
from kimi_jax.runtime.llm import LLM
from kimi_jax.runtime.mesh import rules_for
from spec.training.batches import Batch, Placed
from spec.training.loss import Ends, Streams
from spec.training.states import StoredStates


@runtime_checkable
class StatesSource(Protocol):
    """Where a batch's hidden states come from."""

    def streams(self, batch: Batch, placed: Sequence[Placed]) -> Streams:
        """Of every row; what padding gets is meaningless."""
        ...


@dataclasses.dataclass(frozen=True)
class OnlineStates:
    """The target runs on the batch."""

    llm: LLM
    taps: tuple[int, ...]

    def streams(self, batch: Batch, placed: Sequence[Placed]) -> Streams:
        """One forward over the packed rows."""
        arrays = (batch.tokens, batch.positions, batch.first, batch.is_real)
        taps, hidden = self.llm.engine.hidden_states(*map(np.asarray, arrays), taps=self.taps)
        return Streams(taps=taps, hidden=hidden)


@dataclasses.dataclass(frozen=True)
class OfflineStates:
    """Stored states, put where the samples lie; indices are those of `stored.samples`."""

    stored: StoredStates
    num_taps: int

    def streams(self, batch: Batch, placed: Sequence[Placed]) -> Streams:
        """Reads the samples' states from the files."""
        shape = batch.tokens.shape
        hidden: np.ndarray | None = None
        joined: np.ndarray | None = None
        for place in placed:
            own_hidden, own_taps = self.stored.read(place.sample)
            if hidden is None or joined is None:
                hidden = np.zeros((*shape, own_hidden.shape[1]), own_hidden.dtype)
                joined = np.zeros((*shape, own_taps.shape[1]), own_taps.dtype)
            rows = slice(place.start, place.start + len(own_hidden))
            hidden[place.row, rows], joined[place.row, rows] = own_hidden, own_taps
        assert hidden is not None and joined is not None  # no batch is empty
        taps = np.split(joined, self.num_taps, axis=-1) if self.num_taps else []
        states: dict[str, Any] = {"taps": tuple(taps), "hidden": hidden}
        return Streams(**states)


def ends_of(llm: LLM) -> tuple[Ends, jax.Array]:
    """The matrices of a loaded target, and its final norm."""
    model = llm.model
    return Ends(model.embed_tokens[...], transformer.head(model)), model.norm[...]


def load_ends(path_or_id: str, cfg: ModelConfig, mesh: Mesh, dtype: str) -> tuple[Ends, jax.Array]:
    """The same from a checkpoint, without the layers.

    Raises:
        CheckpointError: the folder cannot be used.
    """
    plan = open_checkpoint(cfg, resolve(path_or_id))
    names = {"embed_tokens": "V D", "lm_head": "D V", "norm": "D"}
    rows = {path: row for path, row in plan.parameters.items() if path in names}
    rules = rules_for(mesh)
    wanted = {
        path: jax.ShapeDtypeStruct(
            row.shape, jnp.dtype(dtype), sharding=NamedSharding(mesh, rules.pspec(names[path]))
        )
        for path, row in rows.items()
    }
    params = load_params(dataclasses.replace(plan, parameters=rows), wanted, progress=False)
    embedding = params["embed_tokens"]
    return Ends(embedding, params.get("lm_head", embedding.T)), params["norm"]
