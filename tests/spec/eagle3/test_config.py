"""Published drafter configurations: their values, both id conventions, and every refusal."""

import json
import logging

import pytest
from make_random_drafter import tiny_drafter_config
from spec_options import TARGET

from kimi_jax.config import RopeConfig
from spec.eagle3.config import DrafterConfig, DrafterError

# AQ-MedAI/Kimi-K25-eagle3.
LLAMA = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "attention_bias": False,
    "bos_token_id": 163584,
    "draft_vocab_size": 32000,
    "eagle_config": {
        "eagle_aux_hidden_state_layer_ids": [2, 30, 58],
        "use_aux_hidden_state": True,
    },
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "max_position_embeddings": 262144,
    "mlp_bias": False,
    "num_attention_heads": 64,
    "num_hidden_layers": 1,
    "num_key_value_heads": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 163840,
}
YARN = {
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "factor": 64.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
    "type": "yarn",
}
# k-l-lambda/Kimi-K2.5-Eagle3, NVIDIA's format; it keeps fields of the target's experts.
MLA = {
    "architectures": ["Eagle3DeepseekV2ForCausalLM"],
    "model_type": "kimi_k2",
    "draft_vocab_size": 163840,
    "eagle_config": {
        "eagle_aux_hidden_state_layer_ids": [2, 30, 58],
        "use_aux_hidden_state": True,
    },
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 262144,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_routed_experts": 384,
    "num_attention_heads": 64,
    "num_hidden_layers": 1,
    "num_key_value_heads": 64,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05,
    "rope_scaling": YARN,
    "rope_theta": 50000.0,
    "v_head_dim": 128,
    "vocab_size": 163840,
}
PUBLISHED = {"llama": LLAMA, "mla": MLA}


def read(data: dict, num_target_layers: int = 61, **kwargs) -> DrafterConfig:
    return DrafterConfig.from_dict(data, num_target_layers=num_target_layers, **kwargs)


def problems_of(data: dict, num_target_layers: int = 61, **kwargs) -> str:
    with pytest.raises(DrafterError) as caught:
        read(data, num_target_layers, **kwargs)
    assert all(problem in str(caught.value) for problem in caught.value.problems)
    return "\n".join(caught.value.problems)


def with_eagle(data: dict, **fields) -> dict:
    return data | {"eagle_config": data["eagle_config"] | fields}


def without(data: dict, *names: str) -> dict:
    return {name: value for name, value in data.items() if name not in names}


def test_llama_style_as_published():
    assert read(LLAMA) == DrafterConfig(
        kind="llama",
        vocab_size=163840,
        draft_vocab_size=32000,
        hidden_size=7168,
        target_hidden_size=7168,
        intermediate_size=18432,
        num_attention_heads=64,
        num_key_value_heads=64,
        head_dim=128,
        rms_norm_eps=1e-6,
        max_position_embeddings=262144,
        rope=RopeConfig(theta=1e6),
        taps=(2, 30, 58),
    )


def test_mla_style_as_published():
    cfg = read(MLA)
    rope = RopeConfig(theta=50000.0, factor=64.0, mscale_all_dim=1.0)
    assert (cfg.kind, cfg.draft_vocab_size, cfg.rms_norm_eps) == ("mla", 163840, 1e-5)
    assert (cfg.num_key_value_heads, cfg.head_dim, cfg.rope) == (64, 0, rope)
    assert cfg.mla is not None
    assert (cfg.mla.num_hidden_layers, cfg.mla.is_moe_layer(0)) == (1, False)
    assert (cfg.mla.q_lora_rank, cfg.mla.kv_lora_rank, cfg.mla.v_head_dim) == (1536, 512, 128)
    assert (cfg.mla.rms_norm_eps, cfg.mla.latent_norm_eps, cfg.mla.rope) == (1e-5, 1e-5, rope)
    assert cfg.mla.softmax_scale == pytest.approx(0.14468, rel=1e-4)
    assert hash(cfg) == hash(read(MLA))


def test_latent_epsilon_is_read_where_a_file_has_it():
    cfg = read(MLA | {"latent_norm_eps": 1e-7})
    assert cfg.mla is not None and cfg.mla.latent_norm_eps == 1e-7


def test_the_v3_name_is_the_same_architecture():
    assert read(MLA | {"architectures": ["Eagle3DeepseekV3ForCausalLM"]}) == read(MLA)


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        ("llama", {"architectures": ["LlamaForCausalLM"]}),
        ("llama", {"architectures": None, "model_type": "llama"}),
        ("mla", {"architectures": ["DeepseekV3ForCausalLM"]}),
        ("mla", {"architectures": [], "model_type": "kimi_k2"}),
        ("mla", {"architectures": None, "model_type": "deepseek_v3"}),
    ],
)
def test_w_2_config_that_names_the_base_architecture(kind, named):
    assert read(PUBLISHED[kind] | named) == read(PUBLISHED[kind])


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ({"architectures": ["Qwen3ForCausalLM"]}, "Qwen3ForCausalLM"),
        ({"architectures": None, "model_type": "gpt_oss"}, "gpt_oss"),
        ({"architectures": None, "model_type": None}, "model_type is None"),
    ],
)
def test_other_architectures_are_refused(named, said):
    assert said in problems_of(LLAMA | named)


def test_the_architecture_decides_before_the_ranks():
    assert "kv_lora_rank is missing" in problems_of(without(MLA, "kv_lora_rank"))


@pytest.mark.parametrize(
    "data",
    [
        {"architectures": ["KimiK25ForConditionalGeneration"], "text_config": {}},
        without(MLA, "eagle_config")
        | {"architectures": ["DeepseekV3ForCausalLM"], "num_hidden_layers": 61},
    ],
)
def test_spc_7_the_targets_configuration_is_recognised(data):
    assert "target checkpoint" in problems_of(data)


# Tapped layers.


def test_ids_from_1_number_outputs_and_others_inputs():
    for ids in ([1, 29, 57], [2, 30, 58]):
        assert read(with_eagle(LLAMA, eagle_aux_hidden_state_layer_ids=ids)).taps == (2, 30, 58)
    ids = [0, 29, 57]
    assert read(with_eagle(LLAMA, eagle_aux_hidden_state_layer_ids=ids)).taps == (0, 29, 57)


def test_ids_at_the_top_level():
    data = without(LLAMA, "eagle_config") | {"eagle_aux_hidden_state_layer_ids": [1, 29, 57]}
    assert read(data).taps == (2, 30, 58)
    text = problems_of(LLAMA | {"eagle_aux_hidden_state_layer_ids": [1, 29, 57]})
    assert "eagle_config" in text and "[1, 29, 57]" in text


def test_missing_ids_get_the_default_and_a_warning(caplog):
    with caplog.at_level(logging.WARNING):
        assert read(without(LLAMA, "eagle_config")).taps == (2, 30, 58)
    assert "eagle_aux_hidden_state_layer_ids" in caplog.text and "[2, 30, 58]" in caplog.text
    assert "default for 4 layers" in problems_of(without(LLAMA, "eagle_config"), 4)


def test_an_argument_replaces_the_ids_as_it_is():
    assert read(LLAMA, taps=(1, 31, 61)).taps == (1, 31, 61)
    assert read(without(LLAMA, "eagle_config"), taps=(3, 31, 59)).taps == (3, 31, 59)
    assert "taps" in problems_of(LLAMA, taps=(3, 2, 1))


def test_boundaries_of_the_target_are_the_limits():
    assert read(with_eagle(LLAMA, eagle_aux_hidden_state_layer_ids=[0, 61])).taps == (0, 61)
    for ids in ([1, 61], [2, 62], [-1, 2]):
        assert "61 layers" in problems_of(with_eagle(LLAMA, eagle_aux_hidden_state_layer_ids=ids))


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        ([30, 2, 58], "not ascending"),
        ([2, 2, 58], "not ascending"),
        ([], "empty"),
        ([2, 30.0, 58], "list of layer numbers"),
        ([2, True], "list of layer numbers"),
        ("2,30,58", "list of layer numbers"),
    ],
)
def test_other_ids_are_refused(ids, said):
    assert said in problems_of(with_eagle(LLAMA, eagle_aux_hidden_state_layer_ids=ids))


# Variants.


def test_variant_flags():
    cfg = read(LLAMA | {"fc_norm": True, "norm_output": True})
    assert (cfg.fc_norm, cfg.norm_output, cfg.norm_before_fc) == (True, True, False)
    cfg = read(with_eagle(MLA, norm_before_fc=True, norm_before_residual=True))
    assert (cfg.norm_before_fc, cfg.norm_before_residual, cfg.fc_norm) == (True, True, False)
    assert read(LLAMA | {"use_aux_norm": True}).fc_norm


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"fc_norm": True, "norm_before_fc": True}, "exclude each other"),
        ({"use_aux_norm": True, "fc_norm": False}, "use_aux_norm"),
        ({"norm_output": "yes"}, "norm_output is 'yes'"),
        ({"eagle_config": [1]}, "eagle_config is [1]"),
        ({"use_aux_hidden_state": False}, "use_aux_hidden_state is False, but under eagle_config"),
    ],
)
def test_contradictory_flags_are_refused(changes, said):
    assert said in problems_of(LLAMA | changes)


@pytest.mark.parametrize("where", ["top", "eagle_config"])
def test_without_auxiliary_states_nothing_is_tapped(where):
    flag = {"use_aux_hidden_state": False}
    plain = without(LLAMA, "eagle_config")
    data = plain | (flag if where == "top" else {"eagle_config": flag})
    cfg = read(data)
    assert (cfg.use_aux_hidden_state, cfg.taps) == (False, ())
    text = problems_of(data | {"fc_norm": True, "target_hidden_size": 4096}, taps=(2, 3))
    assert "fc_norm" in text and "taps" in text and "4096" in text


def test_sizes_that_are_not_stated():
    names = ("draft_vocab_size", "num_key_value_heads", "head_dim", "rms_norm_eps")
    cfg = read(without(LLAMA, *names))
    sizes = (cfg.draft_vocab_size, cfg.num_key_value_heads, cfg.head_dim, cfg.rms_norm_eps)
    assert sizes == (163840, 64, 112, 1e-6)
    assert read(LLAMA | {"draft_vocab_size": None}).draft_vocab_size == 163840
    assert read(LLAMA | {"target_hidden_size": 4096}).target_hidden_size == 4096


# RoPE: the drafter's own (pitfalls 7 and 37 of the facts).


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": None, "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}},
        {"rope_scaling": {"rope_type": "default"}},
        {"rope_scaling": {"rope_type": "default", "rope_theta": 1e6}, "rope_theta": None},
    ],
)
def test_llama_spellings_of_plain_rope(rope):
    assert read(LLAMA | rope).rope == RopeConfig(theta=1e6)


@pytest.mark.parametrize("kind", ["yarn", "linear", "llama3", "dynamic"])
def test_llama_scaling_is_refused_by_name(kind):
    scaling = YARN | {"type": kind}
    assert f"'{kind}'" in problems_of(LLAMA | {"rope_scaling": scaling})
    assert f"'{kind}'" in problems_of(LLAMA | {"rope_parameters": {"rope_type": kind}})


def test_mla_is_yarn_only_where_the_type_says_so():
    plain = {"rope_type": "default", "rope_theta": 50000.0}
    for rope in (
        {"rope_scaling": None},
        {"rope_scaling": plain},
        {"rope_scaling": plain, "rope_parameters": plain},
    ):
        cfg = read(MLA | rope)
        assert cfg.rope == RopeConfig(theta=50000.0)
        assert cfg.mla is not None and cfg.mla.softmax_scale == pytest.approx(192**-0.5)
    assert "'linear'" in problems_of(MLA | {"rope_scaling": {"type": "linear", "factor": 2.0}})


# Refusals.


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_hidden_layers": 2}, "num_hidden_layers is 2"),
        ({"quantization_config": {"quant_method": "quark"}}, "'quark'"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings"),
        ({"sliding_window": 4096}, "sliding_window"),
        ({"sliding_window": 4096, "use_sliding_window": True}, "use_sliding_window"),
        ({"draft_vocab_size": 163841}, "draft_vocab_size is 163841"),
        ({"draft_vocab_size": 0}, "draft_vocab_size is 0"),
        ({"num_key_value_heads": 48}, "num_key_value_heads 48"),
        ({"head_dim": 127}, "head_dim must be even"),
        ({"head_dim": None, "num_attention_heads": 60}, "head_dim is missing"),
        ({"rope_theta": None}, "rope_theta is missing"),
        ({"vocab_size": "163840"}, "vocab_size is '163840'"),
    ],
)
def test_refused_by_name(changes, said):
    assert said in problems_of(LLAMA | changes)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"q_lora_rank": None}, "q_lora_rank is missing"),
        ({"qk_rope_head_dim": 63}, "qk_rope_head_dim must be even"),
        ({"rope_interleave": False}, "rope_interleave"),
        ({"num_hidden_layers": 2}, "num_hidden_layers is 2"),
    ],
)
def test_refused_by_name_in_the_mla_style(changes, said):
    assert said in problems_of(MLA | changes)


def test_a_sliding_window_that_is_off_changes_nothing():
    assert read(LLAMA | {"sliding_window": 4096, "use_sliding_window": False}) == read(LLAMA)


def test_all_problems_at_once():
    bad = with_eagle(LLAMA, eagle_aux_hidden_state_layer_ids=[58, 2])
    bad |= {"hidden_size": None, "fc_norm": True, "norm_before_fc": True, "num_hidden_layers": 3}
    text = problems_of(bad)
    for said in ("hidden_size is missing", "exclude", "num_hidden_layers", "not ascending"):
        assert said in text


# Files, and back.


def test_from_folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert DrafterConfig.from_folder(tmp_path, num_target_layers=61) == read(LLAMA)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"hidden_act": "gelu"}))
    with pytest.raises(DrafterError, match=r"config\.json: hidden_act"):
        DrafterConfig.from_folder(tmp_path, num_target_layers=61)


@pytest.mark.parametrize(
    ("text", "said"), [(None, "no such file"), ("{", "not readable"), ("[]", "JSON object")]
)
def test_from_folder_without_a_configuration(tmp_path, text, said):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(DrafterError, match=said):
        DrafterConfig.from_folder(tmp_path, num_target_layers=61)


@pytest.mark.parametrize("kind", ["llama", "mla"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"fc_norm": True, "norm_output": True},
        {"norm_before_fc": True, "norm_before_residual": True, "target_hidden_size": 96},
        {"use_aux_hidden_state": False},
        {"rope": RopeConfig(theta=500.0), "rms_norm_eps": 1e-5},
    ],
)
def test_to_dict_is_read_back(kind, changes):
    cfg = tiny_drafter_config(kind, TARGET, **changes)
    text = json.dumps(cfg.to_dict())
    assert DrafterConfig.from_dict(json.loads(text), num_target_layers=3) == cfg


def test_published_files_survive_the_round_trip():
    for data in PUBLISHED.values():
        cfg = read(data)
        assert read(cfg.to_dict()) == cfg


def test_taps_from_1_have_no_published_spelling():
    with pytest.raises(DrafterError, match="spelling"):
        tiny_drafter_config("llama", TARGET, taps=(1, 2)).to_dict()
