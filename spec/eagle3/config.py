"""A drafter's configuration, read from the `config.json` published beside EAGLE-3 weights.

Reads the Llama-style and the MLA-style files, with EAGLE's fields at the top level or under
`eagle_config`, and the two conventions for numbering the tapped layers. Sizes, epsilon and RoPE
are the drafter's own, never the target's. It knows nothing of tensors.
"""

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any, Literal

from kimi_jax.checkpoint.reader import CheckpointError
from kimi_jax.config import ModelConfig, Reader, RopeConfig, read_rope

_KINDS: dict[str, Literal["llama", "mla"]] = {
    "LlamaForCausalLMEagle3": "llama",
    "Eagle3DeepseekV2ForCausalLM": "mla",
    "Eagle3DeepseekV3ForCausalLM": "mla",
}
# Some files name only the model that the drafter's layer is taken from (sglang #33966).
_BASE_ARCHITECTURES = ("LlamaForCausalLM", "DeepseekV3ForCausalLM")
_MODEL_TYPES = ("llama", "kimi_k2", "deepseek_v3")
_COUNTS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "max_position_embeddings",
)
_MLA_COUNTS = (
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
)
_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
_FLAGS = {
    "use_aux_hidden_state": True,
    "fc_norm": False,
    "norm_before_fc": False,
    "norm_output": False,
    "norm_before_residual": False,
}
_EAGLE_FIELDS = (_LAYER_IDS, *_FLAGS, "use_aux_norm")
# The default of both LlamaConfig and DeepseekV3Config.
_DEFAULT_EPS = 1e-6

_log = logging.getLogger(__name__)


class DrafterError(CheckpointError):
    """A drafter that cannot be used, or not with this target; `problems` lists every reason."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrafterConfig:
    """Sizes and variants of an EAGLE-3 drafter, in the published spelling where there is one.

    `taps` are the boundaries of the target whose residual streams the drafter reads, each the
    number of the layer that the stream enters (the number of layers: after the last), ascending;
    empty without `use_aux_hidden_state`, where the drafter reads the final hidden state alone.
    `norm_before_fc` and `fc_norm` are one norm over all tapped streams and one over each.
    `mla` is the drafter's layer as a model of one dense layer, None for the Llama style;
    `head_dim` is 0 where it is set.
    """

    kind: Literal["llama", "mla"]
    vocab_size: int
    draft_vocab_size: int
    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    taps: tuple[int, ...]
    use_aux_hidden_state: bool = True
    fc_norm: bool = False
    norm_before_fc: bool = False
    norm_output: bool = False
    norm_before_residual: bool = False
    mla: ModelConfig | None = None

    @classmethod
    def from_folder(
        cls,
        folder: str | Path,
        *,
        num_target_layers: int,
        taps: tuple[int, ...] | None = None,
    ) -> "DrafterConfig":
        """Reads `config.json` of a drafter's folder; see `from_dict`.

        Raises:
            DrafterError: no such file, not JSON, or a drafter this project does not run.
        """
        path = Path(folder) / "config.json"
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise DrafterError(path, ["no such file; a drafter's folder holds one"]) from None
        except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
            raise DrafterError(path, [f"not readable as JSON ({error})"]) from None
        if not isinstance(data, dict):
            raise DrafterError(path, [f"expected a JSON object, found {type(data).__name__}"])
        return _read(data, num_target_layers, taps, path)

    @classmethod
    def from_dict(
        cls,
        data: dict[str, Any],
        *,
        num_target_layers: int,
        taps: tuple[int, ...] | None = None,
    ) -> "DrafterConfig":
        """Reads the parsed `config.json`.

        Published layer ids that begin with 1 number the layers whose output is read, and 1 is
        added to all; others number the layers whose input is read (the rule of sglang #25454).

        Args:
            data: the file's object.
            num_target_layers: N; files without layer ids get (2, N//2, N-3), the reference's rule.
            taps: replaces the file's layer ids, taken as `DrafterConfig.taps` counts.

        Raises:
            DrafterError: names every missing, ill-typed or unsupported field at once.
        """
        return _read(data, num_target_layers, taps, "config.json")

    def to_dict(self) -> dict[str, Any]:
        """The published spelling; `from_dict` reads it back.

        Raises:
            DrafterError: the first tap is 1, which readers would take for the other convention.
        """
        if self.taps and self.taps[0] == 1:
            problem = f"taps {self.taps} have no published spelling: ids from 1 are read as from 2"
            raise DrafterError("DrafterConfig", [problem])
        out: dict[str, Any] = {
            "architectures": [next(name for name, kind in _KINDS.items() if kind == self.kind)],
            "model_type": "llama" if self.mla is None else "kimi_k2",
            **{name: getattr(self, name) for name in _COUNTS},
            "draft_vocab_size": self.draft_vocab_size,
            "target_hidden_size": self.target_hidden_size,
            "num_hidden_layers": 1,
            "num_key_value_heads": self.num_key_value_heads,
            "rms_norm_eps": self.rms_norm_eps,
            "hidden_act": "silu",
            "attention_bias": False,
            "tie_word_embeddings": False,
        }
        if self.mla is None:
            out |= {"head_dim": self.head_dim, "mlp_bias": False}
            out |= {"rope_theta": self.rope.theta, "rope_scaling": None}
        else:
            published = self.mla.to_dict()
            names = (*_MLA_COUNTS, "rope_theta", "rope_scaling", "latent_norm_eps")
            out |= {name: published[name] for name in names}
            out |= {"first_k_dense_replace": 1, "moe_layer_freq": 1}
        out |= {name: getattr(self, name) for name in _FLAGS if name != "use_aux_hidden_state"}
        out["eagle_config"] = {
            _LAYER_IDS: list(self.taps),
            "use_aux_hidden_state": self.use_aux_hidden_state,
        }
        return out


def _read(
    data: dict[str, Any], num_layers: int, taps: tuple[int, ...] | None, where: str | Path
) -> DrafterConfig:
    if _is_target(data):
        problem = "the configuration of a target checkpoint; a drafter has one dense layer"
        raise DrafterError(where, [problem])
    data, clashes = _flatten(data)
    kind = _kind(data)
    read = Reader(data)
    count = {name: read.number(name, int) for name in _COUNTS}
    V, D, N = (count[name] for name in ("vocab_size", "hidden_size", "num_attention_heads"))
    W = read.number("draft_vocab_size", int, V)
    wide = read.number("target_hidden_size", int, D)
    eps = read.number("rms_norm_eps", float, _DEFAULT_EPS, minimum=0.0)
    ranks: dict[str, Any] = {}
    P, H = N, 0
    if kind == "mla":
        ranks = {name: read.number(name, int) for name in _MLA_COUNTS}
        # Serving engines give every norm of a drafter the same epsilon.
        ranks["latent_norm_eps"] = read.number("latent_norm_eps", float, eps, minimum=0.0)
    else:
        # The defaults are LlamaConfig's.
        P = read.number("num_key_value_heads", int, N)
        H = read.number("head_dim", int, D // N if D % N == 0 else None)
    if not read.problems:
        rotated = "qk_rope_head_dim" if kind == "mla" else "head_dim"
        if ranks.get(rotated, H) % 2:
            read.problems.append(f"{rotated} must be even (RoPE rotates pairs)")
        if N % P:
            read.problems.append(f"num_attention_heads is {N}, num_key_value_heads {P}: no groups")
        if W > V:
            read.problems.append(f"draft_vocab_size is {W}, more than the vocab_size of {V}")
    read.problems += clashes
    rope = read_rope(data, read) if kind == "mla" else _read_plain_rope(data, read)
    _refuse_unsupported(data, kind, read)
    flags = _read_flags(data, read)
    if flags["use_aux_hidden_state"]:
        taps = _read_taps(data, num_layers, taps, read)
    else:
        useless = [name for name in ("fc_norm", "norm_before_fc") if flags[name]]
        useless += ["taps"] if taps is not None else []
        if useless:
            read.problems.append(f"use_aux_hidden_state is false: no place for {useless}")
        if wide != D:
            read.problems.append(
                f"use_aux_hidden_state is false, so target_hidden_size ({wide}) must be "
                f"hidden_size ({D})"
            )
        taps = ()
    if read.problems:
        raise DrafterError(where, read.problems)
    return DrafterConfig(
        kind=kind,
        **count,
        draft_vocab_size=W,
        target_hidden_size=wide,
        num_key_value_heads=P,
        head_dim=H,
        rms_norm_eps=eps,
        rope=rope,
        taps=taps,
        **flags,
        mla=mla_config(**count, **ranks, rope=rope, rms_norm_eps=eps) if ranks else None,
    )


def mla_config(**fields: Any) -> ModelConfig:
    """A model of one dense layer with these fields, for `DrafterConfig.mla`."""
    return ModelConfig(
        num_hidden_layers=1,
        first_k_dense_replace=1,
        # No layer has experts; the least that a configuration may say of them.
        moe_intermediate_size=1,
        n_routed_experts=1,
        n_shared_experts=0,
        num_experts_per_tok=1,
        **fields,
    )


def _is_target(data: dict[str, Any]) -> bool:
    # MLA-style drafters keep the experts' fields of the configuration they were copied from.
    has_many_layers = data.get("num_hidden_layers") != 1 and "n_routed_experts" in data
    return "text_config" in data or (has_many_layers and _KINDS.keys().isdisjoint(_names(data)))


def _names(data: dict[str, Any]) -> list[str]:
    names = data.get("architectures") or []
    return [str(name) for name in names] if isinstance(names, list) else [str(names)]


def _kind(data: dict[str, Any]) -> Literal["llama", "mla"]:
    for name in _names(data):
        if name in _KINDS:
            return _KINDS[name]
    return "mla" if "kv_lora_rank" in data else "llama"


def _flatten(data: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The fields that say something, those of `eagle_config` among them; and what is wrong."""
    out = {name: value for name, value in data.items() if value is not None}
    eagle = out.pop("eagle_config", {})
    if not isinstance(eagle, dict):
        return out, [f"eagle_config is {eagle!r}, expected an object"]
    problems = []
    for name in _EAGLE_FIELDS:
        value = eagle.get(name)
        if value is None:
            continue
        if out.get(name, value) != value:
            problems.append(f"{name} is {out[name]!r}, but under eagle_config {value!r}")
        out[name] = value
    return out, problems


def _refuse_unsupported(data: dict[str, Any], kind: str, read: Reader) -> None:
    """Names of other models, and fields that would change the mathematics or the storage."""
    names = _names(data)
    if any(name not in _KINDS and name not in _BASE_ARCHITECTURES for name in names):
        read.problems.append(f"architectures is {names}, supported: {', '.join(_KINDS)}")
    elif not names and data.get("model_type") not in _MODEL_TYPES:
        read.problems.append(
            f"no architectures, and model_type is {data.get('model_type')!r}, "
            f"supported: {', '.join(_MODEL_TYPES)}"
        )
    read.expect("num_hidden_layers", (1,), 1)
    read.expect("hidden_act", ("silu",), "silu")
    for name in ("tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window"):
        read.expect(name, (False,), False)
    if "sliding_window" in data and "use_sliding_window" not in data:
        read.problems.append(f"sliding_window is {data['sliding_window']!r}, supported: null")
    if kind == "mla":
        read.expect("rope_interleave", (True,), True)
    stored = data.get("quantization_config")
    if stored:
        method = stored.get("quant_method") if isinstance(stored, dict) else stored
        read.problems.append(
            f"quantization_config is of method {method!r}: quantised drafters are not supported"
        )


def _read_flags(data: dict[str, Any], read: Reader) -> dict[str, bool]:
    flags = {name: read.flag(name, default) for name, default in _FLAGS.items()}
    if "use_aux_norm" in data:
        # What fc_norm was called before EAGLE-3.1 was published; sglang reads both.
        old = read.flag("use_aux_norm", False)
        if "fc_norm" in data and old != flags["fc_norm"]:
            read.problems.append("fc_norm and its older name use_aux_norm say different things")
        flags["fc_norm"] = old
    if flags["fc_norm"] and flags["norm_before_fc"]:
        read.problems.append("fc_norm and norm_before_fc exclude each other")
    return flags


def _read_plain_rope(data: dict[str, Any], read: Reader) -> RopeConfig:
    """Llama's RoPE: the drafter's own theta, no scaling."""
    # Whether transformers wrote `rope_parameters` or the older keys, the type decides.
    for name in ("rope_scaling", "rope_parameters"):
        scaling = data.get(name)
        if isinstance(scaling, dict):
            kind = scaling.get("rope_type", scaling.get("type", "default"))
            if kind not in (None, "default"):
                read.problems.append(
                    f"{name}: rope type is {kind!r}, supported in a Llama-style drafter: "
                    "null and 'default'"
                )
                return RopeConfig()
    return read_rope(data, read)


def _read_taps(
    data: dict[str, Any], num_layers: int, taps: tuple[int, ...] | None, read: Reader
) -> tuple[int, ...]:
    where = _LAYER_IDS
    stated = data.get(where)
    if taps is not None:
        where, stated, ids = "taps", list(taps), taps
    elif stated is None:
        ids = (2, num_layers // 2, num_layers - 3)
        where = f"the default for {num_layers} layers"
        stated = list(ids)
        _log.warning("the drafter's config.json has no %s; taking %s", _LAYER_IDS, list(ids))
    elif not isinstance(stated, list) or not all(type(number) is int for number in stated):
        read.problems.append(f"{where} is {stated!r}, expected a list of layer numbers")
        return ()
    else:
        ids = tuple(number + 1 for number in stated) if stated[:1] == [1] else tuple(stated)
    if not ids:
        read.problems.append(f"{where} is empty; without taps use_aux_hidden_state is false")
    if any(first >= second for first, second in zip(ids, ids[1:], strict=False)):
        read.problems.append(f"{where}: {stated} is not ascending")
    outside = [tap for tap in ids if not 0 <= tap <= num_layers]
    if outside:
        shifted = f", taken as the inputs of {list(ids)}," if list(ids) != stated else ""
        read.problems.append(
            f"{where}: {stated}{shifted} goes outside the target's {num_layers} layers"
        )
    return ids
