"""A drafter to begin from, and the trained one as published files.

A new drafter takes its sizes from the target's configuration, as the public drafters for Kimi-K2
models do, and its head and final norm from the target's own. A warm start takes everything from a
published folder, its vocabulary included: another map over a trained head is the fault behind
SpecForge issue 534.
"""

import dataclasses
import os
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from kimi_jax.config import ModelConfig, RopeConfig
from kimi_jax.runtime.decode import Weights
from kimi_jax.runtime.mesh import rules_for
from spec.drafter import BoundEagle3, check_mesh, load_weights
from spec.eagle3.checkpoint import MAP, DrafterFiles, check_target, open_drafter, write_drafter
from spec.eagle3.config import DrafterConfig, DrafterError, mla_config
from spec.eagle3.model import Eagle3, target_taps
from spec.training.loss import Ends
from spec.tree import Chain

LLAMA_VOCABULARY = 32000
"""Draft vocabulary of the public Llama-style drafters."""

LLAMA_THETA = 1e6
"""RoPE base of the public Llama-style drafters for Kimi-K2 models."""


def parse_taps(text: str) -> tuple[int, ...]:
    """The layer ids of a comma-separated option.

    Raises:
        ValueError: not numbers.
    """
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() for word in words):
        raise ValueError(f"--taps is {text!r}, expected numbers such as 2,30,58")
    return tuple(map(int, words))


def default_taps(num_layers: int) -> tuple[int, int, int]:
    """(2, N//2, N-3) of N layers, the reference's rule; (0, N//2, N) where these do not ascend."""
    taps = (2, num_layers // 2, num_layers - 3)
    return taps if taps[0] < taps[1] < taps[2] else (0, num_layers // 2, num_layers)


def new_config(
    target: ModelConfig,
    kind: Literal["llama", "mla"],
    *,
    draft_vocab_size: int | None = None,
    taps: tuple[int, ...] | None = None,
    rope_theta: float | None = None,
    intermediate_size: int | None = None,
    num_key_value_heads: int | None = None,
    is_eagle31: bool = False,
) -> DrafterConfig:
    """The configuration of a new drafter for this target.

    Args:
        target: gives width, heads, feed-forward width, positions; with "mla" also the ranks, the
            epsilon and the RoPE.
        kind: "llama" or "mla".
        draft_vocab_size: None takes 32000, or the target's if that is smaller or the kind "mla".
        taps: ids of the layers whose inputs it reads; None takes `default_taps`.
        rope_theta: of "llama"; None takes 1e6.
        intermediate_size: None takes the target's dense width.
        num_key_value_heads: of "llama"; None takes as many as heads.
        is_eagle31: normalises each tapped stream and carries the normed state (EAGLE-3.1).

    Raises:
        DrafterError: sizes that contradict each other.
    """
    N = target.num_hidden_layers
    taps = default_taps(N) if taps is None else taps
    V = target.vocab_size
    W = draft_vocab_size or (V if kind == "mla" else min(V, LLAMA_VOCABULARY))
    if kind == "mla" and (rope_theta is not None or num_key_value_heads is not None):
        raise DrafterError("a new drafter", ["rope_theta and num_key_value_heads are of 'llama'"])
    heads = target.num_attention_heads
    shared: dict[str, Any] = {
        "vocab_size": V,
        "hidden_size": target.hidden_size,
        "intermediate_size": intermediate_size or target.intermediate_size,
        "num_attention_heads": heads,
        "max_position_embeddings": target.max_position_embeddings,
    }
    if kind == "mla":
        ranks = {
            name: getattr(target, name)
            for name in (
                "q_lora_rank",
                "kv_lora_rank",
                "qk_nope_head_dim",
                "qk_rope_head_dim",
                "v_head_dim",
                "latent_norm_eps",
            )
        }
        own: dict[str, Any] = {"rope": target.rope, "rms_norm_eps": target.rms_norm_eps}
        rest: dict[str, Any] = {"num_key_value_heads": heads, "head_dim": 0}
        rest["mla"] = mla_config(**shared, **own, **ranks)
    else:
        own = {"rope": RopeConfig(theta=rope_theta or LLAMA_THETA), "rms_norm_eps": 1e-6}
        # 128 for Kimi-K2.5, as in the public drafters.
        rest = {
            "num_key_value_heads": num_key_value_heads or heads,
            "head_dim": target.v_head_dim,
        }
    cfg = DrafterConfig(
        kind=kind,
        **shared,
        **own,
        **rest,
        draft_vocab_size=W,
        target_hidden_size=target.hidden_size,
        taps=taps,
        fc_norm=is_eagle31,
        norm_output=is_eagle31,
    )
    # What reading the published form refuses is refused now, not after the training.
    return DrafterConfig.from_dict(cfg.to_dict(), num_target_layers=N)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Beginning:
    """What a run begins from, as far as the small files tell; as an `LLM` takes its drafter.

    The `LLM` it is given to drafts with zeros until `evaluate.serve` gives it weights.
    """

    cfg: DrafterConfig
    files: DrafterFiles | None = None
    """Of a warm start."""
    num_draft_tokens: int = 3

    @classmethod
    def warm(
        cls,
        folder: str | os.PathLike[str],
        target: ModelConfig,
        *,
        taps: tuple[int, ...] | None = None,
        num_draft_tokens: int = 3,
    ) -> "Beginning":
        """A published drafter's folder, to train on.

        Raises:
            DrafterError: no drafter, or not of this target.
        """
        layers = target.num_hidden_layers
        cfg = DrafterConfig.from_folder(Path(folder), num_target_layers=layers, taps=taps)
        check_target(cfg, target)
        files = open_drafter(folder, cfg)
        return cls(cfg=cfg, files=files, num_draft_tokens=num_draft_tokens)

    @property
    def owned(self) -> dict[str, bool]:
        """What of the drafter is its own."""
        if self.files is None:
            has_map = self.cfg.draft_vocab_size < self.cfg.vocab_size
            return {"has_own_embedding": False, "has_own_head": True, "has_map": has_map}
        names = ("has_own_embedding", "has_own_head", "has_map")
        return {name: getattr(self.files, name) for name in names}

    def check(self, cfg: ModelConfig, mesh: Mesh) -> None:
        """Refuses a target or mesh the configuration does not fit.

        Raises:
            DrafterError, MeshError: says what does not fit.
        """
        check_target(self.cfg, cfg)
        check_mesh(self.cfg, mesh)

    def bind(self, cfg: ModelConfig, mesh: Mesh, dtype: jnp.dtype) -> BoundEagle3:
        """The drafter for this target, its weights zeros."""
        abstract = nnx.eval_shape(
            lambda: Eagle3(self.cfg, **self.owned, dtype=dtype, rngs=nnx.Rngs(0))
        )
        graph, state = nnx.split(abstract)
        rules = rules_for(mesh)
        flat = []
        for path, param in nnx.to_flat_state(state):
            placement = NamedSharding(mesh, rules.pspec(param.axes))
            zeros = jnp.zeros(param.shape, param.dtype, device=placement)
            flat.append((path, param.replace(zeros)))
        return BoundEagle3(
            cfg=self.cfg,
            graph=graph,
            weights=nnx.from_flat_state(flat),
            taps=target_taps(self.cfg, cfg),
            shapes=(Chain(self.num_draft_tokens),),
            dtype=dtype,
        )

    def draft_ids(self) -> np.ndarray | None:
        """Target ids of the draft vocabulary of a warm start; None where it is the target's."""
        assert self.files is not None
        return self.files.read(MAP) if self.files.has_map else None

    def model(
        self, draft_ids: np.ndarray | None, ends: Ends, norm: jax.Array, mesh: Mesh, seed: int
    ) -> Eagle3:
        """The drafter in float32: as published, or random with the target's head and final norm.

        Args:
            draft_ids: of a new drafter: target ids of its vocabulary, None where it is the
                target's.
            ends: the target's.
            norm: the target's final norm.
            mesh: of a warm start's weights.
            seed: of a new drafter's.
        """
        dtype = jnp.dtype(jnp.float32)
        if self.files is not None:
            return nnx.merge(*load_weights(self.files, self.cfg, mesh, dtype))
        model = Eagle3(self.cfg, **self.owned, dtype=dtype, rngs=nnx.Rngs(seed))
        head = ends.lm_head if draft_ids is None else ends.lm_head[:, draft_ids]
        model.lm_head[...] = head.astype(dtype)
        model.norm[...] = norm.astype(dtype)
        if draft_ids is not None:
            model.draft_to_target[...] = jnp.asarray(draft_ids, jnp.int32)
        return model


def export_drafter(
    folder: str | os.PathLike[str],
    cfg: DrafterConfig,
    weights: Weights,
    *,
    dtype: str = "bfloat16",
    layer_prefix: str = "midlayer.",
    embedding: jax.Array | None = None,
) -> Path:
    """The folder with the drafter in the published format; replaces one that is there.

    Args:
        folder: made when it does not exist.
        cfg: of the drafter.
        weights: all of them, as `Trainer.weights` gives.
        dtype: of the stored floats.
        layer_prefix: `midlayer.` (SafeAILab, SpecForge) or `layers.0.` (vLLM, speculators).
        embedding: the target's, for engines that want a copy in the drafter; None leaves it out
            where the drafter has none, and engines share the target's.
    """
    arrays = {}
    for path, param in nnx.to_flat_state(weights):
        name = ".".join(map(str, path))
        value = np.asarray(param[...])
        arrays[name] = value if name == MAP else value.astype(jnp.dtype(dtype))
    if embedding is not None and "embed_tokens" not in arrays:
        arrays["embed_tokens"] = np.asarray(embedding).astype(jnp.dtype(dtype))
    return write_drafter(folder, cfg, arrays, layer_prefix=layer_prefix, overwrite=True)
