"""Reading published config.json spellings, refusing what is not supported, writing them again."""

import copy
import dataclasses
import json
import math

import pytest

from kimi_jax.config import ConfigError, ModelConfig, QuantizationConfig, RopeConfig, yarn_mscale
from kimi_jax.published import IGNORE, K25, K25_TEXT, QUANTIZATION, YARN

K25_EXPECTED = ModelConfig(
    vocab_size=163840,
    hidden_size=7168,
    num_hidden_layers=61,
    first_k_dense_replace=1,
    intermediate_size=18432,
    moe_intermediate_size=2048,
    n_routed_experts=384,
    n_shared_experts=1,
    num_experts_per_tok=8,
    num_attention_heads=64,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    max_position_embeddings=262144,
    rope=RopeConfig(
        theta=50000.0,
        factor=64.0,
        beta_fast=32.0,
        beta_slow=1.0,
        mscale=1.0,
        mscale_all_dim=1.0,
        original_max_position_embeddings=4096,
    ),
    n_group=1,
    topk_group=1,
    norm_topk_prob=True,
    routed_scaling_factor=2.827,
    rms_norm_eps=1e-5,
    latent_norm_eps=1e-6,
    tie_word_embeddings=False,
    bos_token_id=163584,
    eos_token_id=(163585,),
    pad_token_id=163839,
    quantization=QuantizationConfig(group_size=32, ignore=tuple(IGNORE)),
    model_type="kimi_k25",
)
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "vocab_size": 129280,
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "hidden_act": "silu",
    "attention_bias": False,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "rope_scaling": YARN | {"beta_fast": 32, "beta_slow": 1, "factor": 40},
    "max_position_embeddings": 163840,
    "num_nextn_predict_layers": 1,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "tie_word_embeddings": False,
}


def text(**changes) -> dict:
    """The flat text config without INT4, with fields changed or, where None, taken out."""
    data = copy.deepcopy(K25_TEXT)
    del data["quantization_config"]
    data |= changes
    return {name: value for name, value in data.items() if value is not None}


def quantized(**changes) -> dict:
    """A flat config whose quantization_config has fields changed ("weights.x" inside weights)."""
    raw = copy.deepcopy(QUANTIZATION)
    (group,) = raw["config_groups"].values()
    for name, value in changes.items():
        part, _, leaf = name.rpartition("__")
        {"": raw, "group": group, "weights": group["weights"]}[part][leaf] = value
    return text(quantization_config=raw)


class TestPublished:
    def test_kimi_k25(self):
        assert ModelConfig.from_dict(K25) == K25_EXPECTED

    def test_nested_model_type_deepseek_v3_and_quantization_at_either_level(self):
        data = copy.deepcopy(K25)
        data["text_config"]["model_type"] = "deepseek_v3"
        del data["quantization_config"]
        assert ModelConfig.from_dict(data) == K25_EXPECTED
        data["quantization_config"] = data["text_config"].pop("quantization_config")
        assert ModelConfig.from_dict(data) == K25_EXPECTED

    def test_rope_parameters_in_place_of_rope_scaling(self):
        data = copy.deepcopy(K25)
        inner = data["text_config"]
        theta, scaling = inner.pop("rope_theta"), inner.pop("rope_scaling")
        kind = scaling.pop("type")
        inner["rope_parameters"] = scaling | {"rope_type": kind, "rope_theta": theta}
        assert ModelConfig.from_dict(data) == K25_EXPECTED
        # Both spellings at once, as a file written by a newer library holds.
        inner |= {"rope_theta": theta, "rope_scaling": scaling | {"type": kind}}
        assert ModelConfig.from_dict(data) == K25_EXPECTED

    def test_rope_parameters_as_transformers_saves_them(self):
        """Both spellings of the type, unset keys as null, and what changes nothing."""
        saved = YARN | {"rope_type": "yarn", "rope_theta": 50000.0, "attention_factor": None}
        saved |= {"truncate": True, "partial_rotary_factor": 1.0}
        data = text(rope_theta=None, rope_scaling=None, rope_parameters=saved, rope_interleave=True)
        assert ModelConfig.from_dict(data).rope == K25_EXPECTED.rope
        plain = {"rope_theta": 10000.0, "rope_type": "default"}
        data = text(rope_theta=None, rope_scaling=None, rope_parameters=plain)
        assert ModelConfig.from_dict(data).rope == RopeConfig(theta=10000.0)

    def test_k2_thinking_is_flat(self):
        data = copy.deepcopy(K25_TEXT)
        data["rope_scaling"]["beta_fast"] = 1.0
        expected = dataclasses.replace(
            K25_EXPECTED,
            model_type="kimi_k2",
            rope=dataclasses.replace(K25_EXPECTED.rope, beta_fast=1.0),
        )
        assert ModelConfig.from_dict(data) == expected

    def test_deepseek_v3(self):
        cfg = ModelConfig.from_dict(DEEPSEEK_V3)
        assert (cfg.n_group, cfg.topk_group, cfg.first_k_dense_replace) == (8, 4, 3)
        assert (cfg.rope.theta, cfg.rope.factor) == (10000.0, 40.0)
        assert isinstance(cfg.rope.theta, float) and cfg.rms_norm_eps == 1e-6
        assert cfg.quantization is None and cfg.pad_token_id is None
        assert cfg.num_hidden_layers == 61 and cfg.num_nextn_predict_layers == 1
        assert (cfg.bos_token_id, cfg.eos_token_id) == (0, (1,))
        assert [cfg.is_moe_layer(i) for i in range(5)] == [False] * 3 + [True] * 2

    def test_files(self, tmp_path):
        (tmp_path / "config.json").write_text(json.dumps(K25))
        assert ModelConfig.from_folder(tmp_path) == K25_EXPECTED
        assert ModelConfig.from_folder(str(tmp_path)) == K25_EXPECTED

    @pytest.mark.parametrize(
        "content, reason",
        [
            (None, "no such file"),
            (b"{", "not readable as JSON"),
            (b"\xff\xfe{}", "not readable as JSON"),
            (b"[1]", "expected a JSON object, found list"),
        ],
    )
    def test_files_that_hold_no_config(self, tmp_path, content, reason):
        if content is not None:
            (tmp_path / "config.json").write_bytes(content)
        with pytest.raises(ConfigError, match=reason):
            ModelConfig.from_folder(tmp_path)


class TestFields:
    @pytest.mark.parametrize(
        "factor, expected", [(64.0, 0.144679626), (32.0, 0.1308608), (1.0, 192**-0.5)]
    )
    def test_softmax_scale(self, factor, expected):
        cfg = ModelConfig.from_dict(text(rope_scaling=YARN | {"factor": factor}))
        # The published numbers have seven and nine digits.
        assert math.isclose(cfg.softmax_scale, expected, rel_tol=5e-8 if factor != 32 else 5e-7)

    def test_softmax_scale_without_mscale_all_dim_is_plain(self):
        scaling = {k: v for k, v in YARN.items() if k != "mscale_all_dim"}
        cfg = ModelConfig.from_dict(text(rope_scaling=scaling))
        assert cfg.rope.mscale_all_dim == 0.0 and cfg.softmax_scale == 192**-0.5

    def test_yarn_mscale(self):
        assert math.isclose(yarn_mscale(64.0, 1.0), 1.41588831, rel_tol=5e-9)
        assert math.isclose(yarn_mscale(32.0, 1.0), 1.34657359, rel_tol=5e-9)
        assert yarn_mscale(1.0, 1.0) == yarn_mscale(64.0, 0.0) == 1.0

    @pytest.mark.parametrize(
        "mscale, mscale_all_dim", [(None, None), (1.0, None), (1.0, 0.0), (0.7, 0.7), (0.5, 1.0)]
    )
    def test_mscales_of_one_meaning(self, mscale, mscale_all_dim):
        scaling = YARN | {"mscale": mscale, "mscale_all_dim": mscale_all_dim}
        rope = ModelConfig.from_dict(text(rope_scaling=scaling)).rope
        assert (rope.mscale, rope.mscale_all_dim) == (mscale or 1.0, mscale_all_dim or 0.0)

    def test_latent_width(self):
        assert K25_EXPECTED.latent_width == 576

    def test_latent_norm_eps_is_read_where_a_file_has_it(self):
        assert ModelConfig.from_dict(text()).latent_norm_eps == 1e-6
        assert ModelConfig.from_dict(text(latent_norm_eps=3e-5)).latent_norm_eps == 3e-5

    @pytest.mark.parametrize("scaling", [None, {"type": "default"}, {"rope_type": "default"}])
    def test_plain_rope(self, scaling):
        cfg = ModelConfig.from_dict(text(rope_scaling=scaling))
        assert cfg.rope == RopeConfig(theta=50000.0, factor=1.0)

    def test_eos_of_one_several_and_none(self):
        assert ModelConfig.from_dict(text(eos_token_id=[7, 9])).eos_token_id == (7, 9)
        assert ModelConfig.from_dict(text(eos_token_id=None)).eos_token_id == ()

    def test_defaults_of_absent_optional_fields(self):
        absent = ("n_shared_experts", "n_group", "topk_group", "norm_topk_prob", "hidden_act")
        absent += ("routed_scaling_factor", "tie_word_embeddings", "scoring_func", "topk_method")
        cfg = ModelConfig.from_dict(text(**dict.fromkeys(absent)))
        assert (cfg.n_shared_experts, cfg.n_group, cfg.topk_group) == (0, 1, 1)
        assert cfg.norm_topk_prob and not cfg.tie_word_embeddings
        assert cfg.routed_scaling_factor == 1.0

    def test_tied_embeddings_at_either_level(self):
        data = copy.deepcopy(K25)
        data["tie_word_embeddings"] = True
        assert not ModelConfig.from_dict(data).tie_word_embeddings  # the text model's own wins
        del data["text_config"]["tie_word_embeddings"]
        assert ModelConfig.from_dict(data).tie_word_embeddings

    def test_whole_numbers_may_be_written_as_floats(self):
        cfg = ModelConfig.from_dict(text(hidden_size=7168.0))
        assert cfg.hidden_size == 7168 and isinstance(cfg.hidden_size, int)


COUNTS = (
    "vocab_size hidden_size num_hidden_layers intermediate_size moe_intermediate_size "
    "n_routed_experts num_experts_per_tok num_attention_heads q_lora_rank kv_lora_rank "
    "qk_nope_head_dim qk_rope_head_dim v_head_dim max_position_embeddings first_k_dense_replace"
).split()


def refused(data: dict) -> str:
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_dict(data)
    return str(caught.value)


class TestRefused:
    @pytest.mark.parametrize("model_type", ["llama", None, 3, ["kimi_k25"]])
    def test_other_models(self, model_type):
        message = refused(K25 | {"model_type": model_type})
        assert repr(model_type) in message and "kimi_k25" in message

    def test_text_config_of_another_kind(self):
        assert "text_config is list" in refused(K25 | {"text_config": []})

    @pytest.mark.parametrize("name", COUNTS)
    def test_missing_count(self, name):
        assert f"{name} is missing" in refused(text(**{name: None}))

    @pytest.mark.parametrize("value", ["64", 1.5, True, [64], -1, math.inf, math.nan])
    def test_ill_typed_count(self, value):
        for name in ("hidden_size", "n_shared_experts", "n_group"):
            assert f"{name} is {value!r}" in refused(text(**{name: value}))

    @pytest.mark.parametrize("value", ["1e-5", True, [1e-5], -1.0, math.inf, math.nan])
    def test_ill_typed_number(self, value):
        for name in ("rms_norm_eps", "latent_norm_eps", "routed_scaling_factor", "rope_theta"):
            assert f"{name} is {value!r}" in refused(text(**{name: value}))
        for name in ("factor", "beta_fast", "mscale_all_dim", "original_max_position_embeddings"):
            message = refused(text(rope_scaling=YARN | {name: value}))
            assert f"rope_scaling: {name} is {value!r}" in message

    @pytest.mark.parametrize("is_null", [True, False])
    def test_queries_without_a_latent(self, is_null):
        data = text()
        del data["q_lora_rank"]
        message = refused(data | {"q_lora_rank": None} if is_null else data)
        assert ("uncompressed queries" in message) == is_null
        assert ("q_lora_rank is missing" in message) != is_null

    @pytest.mark.parametrize("value", [-1, 1.5, "1", True])
    def test_ill_typed_number_of_prediction_layers(self, value):
        message = refused(text(num_nextn_predict_layers=value))
        assert f"num_nextn_predict_layers is {value!r}" in message

    @pytest.mark.parametrize("name", ["beta_fast", "beta_slow"])
    def test_beta_of_zero(self, name):
        message = refused(text(rope_scaling=YARN | {name: 0}))
        assert f"rope_scaling: {name} is 0, expected more than 0" in message

    @pytest.mark.parametrize("value", [1, 1.0, 0.5])
    def test_theta_of_one_or_less(self, value):
        assert f"rope_theta is {value!r}, expected more than 1" in refused(text(rope_theta=value))

    @pytest.mark.parametrize("scaling", [YARN, None])
    def test_theta_has_no_default(self, scaling):
        assert "rope_theta is missing" in refused(text(rope_theta=None, rope_scaling=scaling))

    def test_two_thetas(self):
        message = refused(text(rope_parameters=YARN | {"rope_theta": 10000.0}))
        assert "rope_theta is 10000.0 and 50000.0 at once" in message

    def test_two_scalings(self):
        data = text(rope_parameters=YARN | {"factor": 32.0})
        assert "rope_parameters and rope_scaling say different things" in refused(data)

    @pytest.mark.parametrize(
        "name, value",
        [
            ("attention_factor", 1.0),
            ("truncate", False),
            ("partial_rotary_factor", 0.5),
            ("long_factor", [1.0]),
            ("theta", 1e6),
        ],
    )
    @pytest.mark.parametrize("where", ["rope_scaling", "rope_parameters"])
    def test_rope_keys_that_are_not_read(self, where, name, value):
        data = text(rope_scaling=None) | {where: YARN | {name: value}}
        assert f"{where}: {name} is {value!r}, not supported" in refused(data)

    def test_yarn_without_its_type(self):
        scaling = {k: v for k, v in YARN.items() if k != "type"}
        message = refused(text(rope_scaling=scaling))
        assert "rope_scaling: factor is 64.0, not supported with rope type 'default'" in message

    @pytest.mark.parametrize(
        "mscale, mscale_all_dim", [(0.7, None), (0.7, 0.0), (None, 1.0), (0.0, 1.0), (0.0, None)]
    )
    def test_mscales_of_two_meanings(self, mscale, mscale_all_dim):
        scaling = YARN | {"mscale": mscale, "mscale_all_dim": mscale_all_dim}
        message = refused(text(rope_scaling=scaling))
        assert f"mscale is {mscale!r} and mscale_all_dim {mscale_all_dim!r}" in message

    @pytest.mark.parametrize("name", ["factor", "original_max_position_embeddings"])
    def test_yarn_without_its_constants(self, name):
        scaling = {k: v for k, v in YARN.items() if k != name}
        assert f"rope_scaling: {name} is missing" in refused(text(rope_scaling=scaling))

    @pytest.mark.parametrize(
        "name, value",
        [
            ("hidden_act", "gelu"),
            ("scoring_func", "softmax"),
            ("topk_method", "greedy"),
            ("moe_layer_freq", 2),
            ("attention_bias", True),
            ("rope_interleave", False),
            ("partial_rotary_factor", 0.5),
            ("tie_word_embeddings", "false"),
        ],
    )
    def test_unsupported(self, name, value):
        assert f"{name} is {value!r}, supported" in refused(text(**{name: value}))

    @pytest.mark.parametrize("name", ["norm_topk_prob"])
    def test_ill_typed_switch(self, name):
        assert f"{name} is 'false'" in refused(text(**{name: "false"}))

    @pytest.mark.parametrize("name", ["bos_token_id", "eos_token_id", "pad_token_id"])
    @pytest.mark.parametrize("value", ["</s>", 1.5, True])
    def test_ill_typed_token_id(self, name, value):
        assert name in refused(text(**{name: value}))

    def test_ill_typed_token_id_in_a_list(self):
        assert "eos_token_id" in refused(text(eos_token_id=[163585, "</s>"]))

    @pytest.mark.parametrize("kind", ["linear", "llama3", "dynamic", 3])
    def test_other_rope_types(self, kind):
        message = refused(text(rope_scaling=YARN | {"type": kind}))
        assert f"rope type is {kind!r}" in message

    def test_rope_scaling_of_another_kind(self):
        assert "rope_scaling is [1]" in refused(text(rope_scaling=[1]))

    @pytest.mark.parametrize(
        "changes, reason",
        [
            ({"qk_rope_head_dim": 63}, "qk_rope_head_dim must be even"),
            ({"num_experts_per_tok": 385}, "num_experts_per_tok is larger than n_routed_experts"),
            ({"n_group": 5}, "n_routed_experts is not a multiple of n_group"),
            ({"n_group": 2, "topk_group": 3}, "topk_group is larger than n_group"),
            ({"n_group": 96, "topk_group": 1}, "hold fewer than num_experts_per_tok"),
            ({"n_group": 384, "topk_group": 8}, "a group must hold at least 2"),
            ({"first_k_dense_replace": 62}, "first_k_dense_replace is larger than"),
        ],
    )
    def test_sizes_that_contradict_each_other(self, changes, reason):
        assert reason in refused(text(**changes))

    @pytest.mark.parametrize(
        "changes, reason",
        [
            ({"quant_method": "fp8"}, "method 'fp8'"),
            ({"format": "float-quantized"}, "format 'float-quantized'"),
            ({"config_groups": {}}, "0 config_groups"),
            ({"config_groups": {"a": {}, "b": {}}}, "2 config_groups"),
            ({"weights__num_bits": 8}, "weights.num_bits is 8"),
            ({"weights__type": "float"}, "weights.type is 'float'"),
            ({"weights__symmetric": False}, "weights.symmetric is False"),
            ({"weights__strategy": "channel"}, "weights.strategy is 'channel'"),
            ({"weights__dynamic": True}, "weights.dynamic is True"),
            ({"weights__actorder": "group"}, "weights.actorder is 'group'"),
            ({"weights__group_size": 128}, "group_size is 128"),
            ({"weights__group_size": None}, "group_size is None"),
            ({"group__input_activations": {"num_bits": 8}}, "input_activations are quantized"),
            ({"group__output_activations": {"num_bits": 8}}, "output_activations are quantized"),
            ({"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme is set"),
            ({"group__weights": [4]}, "weights is [4], expected an object"),
            ({"group__weights": "int4"}, "weights is 'int4', expected an object"),
            ({"ignore": "lm_head"}, "ignore is 'lm_head', expected a list of names"),
            ({"ignore": [1]}, "ignore is [1], expected a list of names"),
        ],
    )
    def test_other_quantization(self, changes, reason):
        message = refused(quantized(**changes))
        assert reason in message and "quantization_config: " in message

    @pytest.mark.parametrize(
        "value", ["int4", [QUANTIZATION], QUANTIZATION | {"config_groups": [{}]}]
    )
    def test_quantization_config_of_another_kind(self, value):
        assert "quantization_config" in refused(text(quantization_config=value))

    def test_everything_wrong_comes_at_once(self):
        data = quantized(weights__num_bits=8, weights__group_size=64)
        data |= {"hidden_size": "big", "hidden_act": "gelu", "rms_norm_eps": None}
        data["rope_scaling"] = {"type": "yarn", "factor": 0.5}
        del data["vocab_size"]
        message = refused(data)
        for part in (
            "hidden_size is 'big', expected int",
            "vocab_size is missing",
            "hidden_act is 'gelu'",
            "rms_norm_eps is missing",
            "rope_scaling: factor is 0.5, expected at least 1",
            "rope_scaling: original_max_position_embeddings is missing",
            "weights.num_bits is 8",
            "group_size is 64",
        ):
            assert part in message


VARIANTS = {
    "k25": K25,
    "flat": K25_TEXT,
    "unquantized": text(),
    "plain rope": text(rope_scaling=None),
    "deepseek": DEEPSEEK_V3,
    "several eos, no bos": text(eos_token_id=[1, 2], bos_token_id=None, latent_norm_eps=1e-5),
    "yarn without mscales": text(
        rope_scaling={k: v for k, v in YARN.items() if not k.startswith("mscale")}
    ),
    "tied": text(tie_word_embeddings=True, n_shared_experts=0, norm_topk_prob=False),
}


@pytest.mark.parametrize("name", VARIANTS)
class TestRoundTrips:
    def test_flat(self, name):
        cfg = ModelConfig.from_dict(VARIANTS[name])
        # Through JSON: nothing but published types.
        written = json.loads(json.dumps(cfg.to_dict()))
        if cfg.model_type == "kimi_k25":
            assert "text_config" not in written
        assert ModelConfig.from_dict(written) == cfg

    def test_nested(self, name):
        cfg = ModelConfig.from_dict(VARIANTS[name])
        written = json.loads(json.dumps(cfg.to_kimi_k25_dict()))
        assert written["model_type"] == "kimi_k25"
        assert written["text_config"]["model_type"] == "kimi_k2"
        expected = dataclasses.replace(cfg, model_type="kimi_k25")
        assert ModelConfig.from_dict(written) == expected


def test_written_fields_have_the_published_values():
    written = ModelConfig.from_dict(K25).to_kimi_k25_dict()
    left_out = {"architectures", "auto_map", "vision_config", "text_config", "ignore_index"}
    left_out |= {"media_placeholder_token_id", "use_unified_vision_chunk", "video_placeholder"}
    weights = written["quantization_config"]["config_groups"]["group_0"]["weights"]
    assert weights.items() <= QUANTIZATION["config_groups"]["group_0"]["weights"].items()
    for name in K25.keys() - left_out - {"quantization_config"}:
        assert written[name] == K25[name], name
    unused = {"attention_dropout", "seq_aux", "aux_loss_alpha", "ep_size", "pretraining_tp"}
    unused |= {"initializer_range", "use_cache", "quantization_config"}
    for name in K25_TEXT.keys() - unused:
        assert written["text_config"][name] == K25_TEXT[name], name
