"""The model's configuration: one frozen dataclass, read from a checkpoint's `config.json`.

Reads the published spellings: Kimi-K2.5 (everything under `text_config`), K2-Thinking and
DeepSeek-V3-style text checkpoints (flat), `rope_scaling` + `rope_theta` or `rope_parameters`.
Fields keep their Hugging Face names. It knows nothing of tensors.
"""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

MODEL_TYPES = ("kimi_k25", "kimi_k2", "deepseek_v3")

PUBLISHED_IGNORE = (
    "lm_head",
    "re:.*self_attn.*",
    "re:.*shared_experts.*",
    "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
)
"""What Kimi-K2.5's `quantization_config` leaves in bfloat16: all but the routed experts."""


class ConfigError(ValueError):
    """A `config.json` this project cannot run; the message lists every reason."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """YaRN rotary embedding (`rope_scaling`); factor 1 is plain RoPE."""

    theta: float = 50000.0
    factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0
    original_max_position_embeddings: int = 4096


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizationConfig:
    """compressed-tensors `pack-quantized` INT4 weights, symmetric, grouped along the inputs."""

    group_size: int = 32
    ignore: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes and constants of the text model, in Hugging Face spelling.

    `latent_norm_eps` is the epsilon of `q_a_layernorm` and `kv_a_layernorm`: 1e-6 in the reference
    code, `rms_norm_eps` in serving engines. No published config has the field; when a file does,
    it is read. `num_nextn_predict_layers` layers for multi-token prediction may follow in the
    files; the model has none of them.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    first_k_dense_replace: int
    intermediate_size: int
    moe_intermediate_size: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    max_position_embeddings: int
    rope: RopeConfig
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    rms_norm_eps: float = 1e-5
    latent_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    num_nextn_predict_layers: int = 0
    bos_token_id: int | None = None
    eos_token_id: tuple[int, ...] = ()
    pad_token_id: int | None = None
    quantization: QuantizationConfig | None = None
    model_type: str = "kimi_k2"

    @property
    def softmax_scale(self) -> float:
        """(U+R)^-1/2 times YaRN's m^2, m = 0.1 mscale_all_dim ln(factor) + 1."""
        m = yarn_mscale(self.rope.factor, self.rope.mscale_all_dim)
        return (self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5 * m * m

    @property
    def latent_width(self) -> int:
        """Values a token and layer take in the cache: C after its norm, R after RoPE."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    def is_moe_layer(self, layer: int) -> bool:
        """Whether the layer's feed-forward part is a mixture of experts."""
        return layer >= self.first_k_dense_replace

    @classmethod
    def from_folder(cls, folder: str | Path) -> "ModelConfig":
        """Reads `config.json` of a checkpoint folder.

        Raises:
            ConfigError: no such file, not JSON, or a model this project does not run.
        """
        path = Path(folder) / "config.json"
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ConfigError(f"{path}: no such file; a checkpoint folder holds one") from None
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise ConfigError(f"{path}: not readable as JSON ({error})") from None
        if not isinstance(data, dict):
            raise ConfigError(f"{path}: expected a JSON object, found {type(data).__name__}")
        return cls.from_dict(data)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "ModelConfig":
        """Reads the parsed `config.json`.

        Raises:
            ConfigError: names every missing, ill-typed or unsupported field at once.
        """
        model_type = data.get("model_type")
        if model_type not in MODEL_TYPES:
            raise ConfigError(f"model_type is {model_type!r}; this project runs {MODEL_TYPES}")
        return _read(data)

    def to_dict(self) -> dict[str, Any]:
        """The flat published spelling (`DeepseekV3ForCausalLM`); `from_dict` reads it back."""
        out = dataclasses.asdict(self)
        rope, quantization = out.pop("rope"), out.pop("quantization")
        out["rope_theta"] = rope.pop("theta")
        out["rope_scaling"] = {"type": "yarn", **rope} if rope["factor"] != 1.0 else None
        out["eos_token_id"] = _one_or_list(self.eos_token_id)
        out |= {
            "architectures": ["DeepseekV3ForCausalLM"],
            "num_key_value_heads": self.num_attention_heads,
            "hidden_act": "silu",
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "attention_bias": False,
            "moe_layer_freq": 1,
            "dtype": "bfloat16",
        }
        if quantization is not None:
            out["quantization_config"] = _quantization_dict(
                quantization["group_size"], list(quantization["ignore"])
            )
        return out

    def to_kimi_k25_dict(self) -> dict[str, Any]:
        """The nested published spelling (`KimiK25ForConditionalGeneration`), no vision tower."""
        text = self.to_dict() | {"model_type": "kimi_k2"}
        top = {
            "architectures": ["KimiK25ForConditionalGeneration"],
            "model_type": "kimi_k25",
            "dtype": "bfloat16",
            "tie_word_embeddings": self.tie_word_embeddings,
            "text_config": text,
        }
        for key in ("bos_token_id", "eos_token_id", "pad_token_id", "quantization_config"):
            if key in text:
                top[key] = text[key]
        return top


def yarn_mscale(factor: float, mscale: float) -> float:
    """YaRN's attention factor m(s, a) = 0.1 a ln s + 1 (arXiv 2309.00071, eq. 22)."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1.0 else 1.0


def _one_or_list(ids: tuple[int, ...]) -> int | list[int] | None:
    return (ids[0] if len(ids) == 1 else list(ids)) if ids else None


def _quantization_dict(group_size: int, ignore: list[str]) -> dict[str, Any]:
    weights = {
        "num_bits": 4,
        "type": "int",
        "symmetric": True,
        "strategy": "group",
        "group_size": group_size,
        "dynamic": False,
        "actorder": None,
        "observer": "minmax",
    }
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": None,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "config_groups": {"group_0": group},
        "ignore": ignore,
    }


class Reader:
    """Reads typed fields out of a dict and remembers everything that is wrong."""

    def __init__(self, data: dict[str, Any]):
        self.data = data
        self.problems: list[str] = []

    def number(
        self,
        name: str,
        kind: type,
        default: Any = None,
        minimum: float | int = 1,
        *,
        is_open: bool = False,
    ) -> Any:
        """A number of at least `minimum`, of more than it if `is_open`."""
        value = self.data.get(name, default)
        if value is None:
            self.problems.append(f"{name} is missing")
            return kind(max(minimum, 1))
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        is_number = is_number and math.isfinite(value)
        if not is_number or (kind is int and value != int(value)):
            self.problems.append(f"{name} is {value!r}, expected {kind.__name__}")
            return kind(max(minimum, 1))
        if value < minimum or (is_open and value == minimum):
            bound = "more than" if is_open else "at least"
            self.problems.append(f"{name} is {value!r}, expected {bound} {minimum}")
            return kind(max(minimum, 1))
        return kind(value)

    def flag(self, name: str, default: bool) -> bool:
        """A boolean field."""
        value = self.data.get(name, default)
        if not isinstance(value, bool):
            self.problems.append(f"{name} is {value!r}, expected true or false")
            return default
        return value

    def expect(self, name: str, allowed: tuple, default: Any) -> Any:
        """A field of which only some values are supported."""
        value = self.data.get(name, default)
        if value not in allowed:
            self.problems.append(f"{name} is {value!r}, supported: {', '.join(map(repr, allowed))}")
        return value


def _read(data: dict[str, Any]) -> ModelConfig:
    text = data.get("text_config", data)
    if not isinstance(text, dict):
        raise ConfigError(f"text_config is {type(text).__name__}, expected an object")
    read = Reader(text)
    count = {name: read.number(name, int) for name in _COUNTS}
    if "q_lora_rank" in text and text["q_lora_rank"] is None:
        read.problems[read.problems.index("q_lora_rank is missing")] = (
            "q_lora_rank is null: uncompressed queries (q_proj, no q_a_proj) are not supported"
        )
    zero_ok = {"first_k_dense_replace": None, "n_shared_experts": 0, "num_nextn_predict_layers": 0}
    for name, default in zero_ok.items():
        count[name] = read.number(name, int, default, minimum=0)
    n_group = read.number("n_group", int, 1)
    topk_group = read.number("topk_group", int, 1)
    read.expect("hidden_act", ("silu",), "silu")
    read.expect("scoring_func", ("sigmoid",), "sigmoid")
    read.expect("topk_method", ("noaux_tc",), "noaux_tc")
    read.expect("moe_layer_freq", (1,), 1)
    read.expect("attention_bias", (False, None), False)
    read.expect("rope_interleave", (True,), True)
    read.expect("partial_rotary_factor", (1, None), None)
    tie = read.expect("tie_word_embeddings", (True, False), data.get("tie_word_embeddings", False))

    if not read.problems:
        if count["qk_rope_head_dim"] % 2:
            read.problems.append("qk_rope_head_dim must be even (RoPE rotates pairs)")
        if count["num_experts_per_tok"] > count["n_routed_experts"]:
            read.problems.append("num_experts_per_tok is larger than n_routed_experts")
        if count["n_routed_experts"] % n_group:
            read.problems.append("n_routed_experts is not a multiple of n_group")
        elif topk_group > n_group:
            read.problems.append("topk_group is larger than n_group")
        elif topk_group * (count["n_routed_experts"] // n_group) < count["num_experts_per_tok"]:
            read.problems.append("topk_group groups hold fewer than num_experts_per_tok experts")
        elif n_group > 1 and count["n_routed_experts"] // n_group < 2:
            read.problems.append("a group must hold at least 2 experts (its score sums the best 2)")
        if count["first_k_dense_replace"] > count["num_hidden_layers"]:
            read.problems.append("first_k_dense_replace is larger than num_hidden_layers")
    rope = read_rope(text, read)
    quantization = _read_quantization(data, text, read)
    eps = read.number("rms_norm_eps", float, 1e-5, minimum=0.0)
    latent_eps = read.number("latent_norm_eps", float, 1e-6, minimum=0.0)
    scaling = read.number("routed_scaling_factor", float, 1.0, minimum=0.0)
    norm_topk_prob = read.flag("norm_topk_prob", True)
    ids = {
        name: text.get(name, data.get(name))
        for name in ("bos_token_id", "pad_token_id", "eos_token_id")
    }
    eos = ids["eos_token_id"]
    eos = () if eos is None else tuple(eos) if isinstance(eos, list) else (eos,)
    for name, value in (*ids.items(), *(("eos_token_id", e) for e in eos)):
        several = name == "eos_token_id" and isinstance(value, list)
        if (
            value is not None
            and not several
            and (not isinstance(value, int) or isinstance(value, bool))
        ):
            problem = f"{name} is {value!r}, expected a token id"
            if problem not in read.problems:
                read.problems.append(problem)
    if read.problems:
        raise ConfigError("config.json: " + "; ".join(read.problems))
    return ModelConfig(
        **count,
        n_group=n_group,
        topk_group=topk_group,
        rope=rope,
        norm_topk_prob=norm_topk_prob,
        routed_scaling_factor=scaling,
        rms_norm_eps=eps,
        latent_norm_eps=latent_eps,
        tie_word_embeddings=bool(tie),
        bos_token_id=ids["bos_token_id"],
        eos_token_id=eos,
        pad_token_id=ids["pad_token_id"],
        quantization=quantization,
        model_type=str(data["model_type"]),
    )


_COUNTS = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "intermediate_size",
    "moe_intermediate_size",
    "n_routed_experts",
    "num_experts_per_tok",
    "num_attention_heads",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "max_position_embeddings",
)


# Keys that change nothing at these values; whatever else is not read is refused.
_ROPE_WITHOUT_EFFECT = {"truncate": True, "partial_rotary_factor": 1}


def read_rope(text: dict[str, Any], read: Reader) -> RopeConfig:
    """RoPE in either published spelling; YaRN only where the type says so."""
    # transformers >= 5 writes one `rope_parameters` dict; published files have the two older keys.
    stated = {
        name: text[name]
        for name in ("rope_parameters", "rope_scaling")
        if text.get(name) not in (None, {})
    }
    wrong = [name for name, value in stated.items() if not isinstance(value, dict)]
    if wrong:
        read.problems += [f"{name} is {stated[name]!r}, expected an object" for name in wrong]
        return RopeConfig()
    stated = {name: _without_nulls(value) for name, value in stated.items()}
    where, scaling = next(iter(stated.items()), ("rope_scaling", {}))
    if any(_scaling(other) != _scaling(scaling) for other in stated.values()):
        read.problems.append("rope_parameters and rope_scaling say different things")
    thetas = [
        v["rope_theta"] for v in (*stated.values(), _without_nulls(text)) if "rope_theta" in v
    ]
    if any(theta != thetas[0] for theta in thetas):
        read.problems.append(f"rope_theta is {' and '.join(map(repr, thetas))} at once")
    theta = Reader({"rope_theta": thetas[0]} if thetas else {})
    rope = Reader(scaling)
    base = theta.number("rope_theta", float, is_open=True)
    kind = _scaling(scaling)["rope_type"]
    if kind == "default":
        out, used = RopeConfig(theta=base), set()
    elif kind in ("yarn", "deepseek_yarn"):
        out = RopeConfig(
            theta=base,
            factor=rope.number("factor", float),
            beta_fast=rope.number("beta_fast", float, 32.0, minimum=0.0, is_open=True),
            beta_slow=rope.number("beta_slow", float, 1.0, minimum=0.0, is_open=True),
            mscale=rope.number("mscale", float, 1.0, minimum=0.0),
            mscale_all_dim=rope.number("mscale_all_dim", float, 0.0, minimum=0.0),
            original_max_position_embeddings=rope.number("original_max_position_embeddings", int),
        )
        used = {field.name for field in dataclasses.fields(RopeConfig)} - {"theta"}
        # Alone, each means one thing in transformers and another in the models' own code.
        has_both = scaling.get("mscale") and scaling.get("mscale_all_dim")
        if not has_both and (out.mscale, out.mscale_all_dim) != (1.0, 0.0):
            rope.problems.append(
                f"mscale is {scaling.get('mscale')!r} and mscale_all_dim "
                f"{scaling.get('mscale_all_dim')!r}, supported: both, or mscale 1 alone, or neither"
            )
    else:
        read.problems.append(f"rope type is {kind!r}, supported: 'yarn' and 'default'")
        return RopeConfig()
    for name, value in scaling.items():
        if name in used or name in ("type", "rope_type", "rope_theta"):
            continue
        if _ROPE_WITHOUT_EFFECT.get(name) != value:
            rope.problems.append(f"{name} is {value!r}, not supported with rope type {kind!r}")
    read.problems += [*theta.problems, *(f"{where}: {p}" for p in rope.problems)]
    return out


def _without_nulls(data: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in data.items() if value is not None}


def _scaling(stated: dict[str, Any]) -> dict[str, Any]:
    """One spelling of the type, and no `rope_theta`, which is compared on its own."""
    rest = {n: v for n, v in stated.items() if n not in ("type", "rope_type", "rope_theta")}
    return {"rope_type": stated.get("rope_type", stated.get("type", "default")), **rest}


def _read_quantization(
    data: dict[str, Any], text: dict[str, Any], read: Reader
) -> QuantizationConfig | None:
    raw = text.get("quantization_config") or data.get("quantization_config")
    if raw is None:
        return None
    where = "quantization_config"
    if not isinstance(raw, dict):
        read.problems.append(f"{where} is {raw!r}, expected an object")
        return None
    if raw.get("quant_method") != "compressed-tensors" or raw.get("format") != "pack-quantized":
        read.problems.append(
            f"{where}: method {raw.get('quant_method')!r}, format {raw.get('format')!r}; "
            "supported: 'compressed-tensors' with 'pack-quantized', or an unquantized checkpoint"
        )
        return None
    groups = raw.get("config_groups") or {}
    if not isinstance(groups, dict) or not all(isinstance(g, dict) for g in groups.values()):
        read.problems.append(f"{where}: config_groups is {groups!r}, expected objects")
        return None
    if len(groups) != 1:
        read.problems.append(f"{where}: {len(groups)} config_groups, supported: one")
        return None
    (group,) = groups.values()
    weights = group.get("weights") or {}
    if not isinstance(weights, dict):
        read.problems.append(f"{where}: weights is {weights!r}, expected an object")
        return None
    ignore = raw.get("ignore") or []
    if not isinstance(ignore, list) or not all(isinstance(entry, str) for entry in ignore):
        read.problems.append(f"{where}: ignore is {ignore!r}, expected a list of names")
        return None
    wanted = {
        "num_bits": (4,),
        "type": ("int",),
        "symmetric": (True,),
        "strategy": ("group",),
        "dynamic": (False, None),
        # static and dynamic act-order both permute columns.
        "actorder": (None, False),
    }
    for name, allowed in wanted.items():
        if weights.get(name) not in allowed:
            read.problems.append(
                f"{where}: weights.{name} is {weights.get(name)!r}, supported: {allowed[0]!r}"
            )
    size = weights.get("group_size")
    if size != 32:
        read.problems.append(f"{where}: group_size is {size!r}, supported: 32")
    for name in ("input_activations", "output_activations"):
        if group.get(name) is not None:
            read.problems.append(f"{where}: {name} are quantized, supported: weights only")
    if raw.get("kv_cache_scheme") is not None:
        read.problems.append(f"{where}: kv_cache_scheme is set, supported: null")
    return QuantizationConfig(group_size=32, ignore=tuple(ignore))
