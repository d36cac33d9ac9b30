"""The table at full size, and every way a checkpoint can disagree with it (CKP-3, -4, INT-*)."""

import collections
import dataclasses
import logging

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from kimi_jax.checkpoint import table
from kimi_jax.checkpoint.reader import CheckpointError, CheckpointFiles
from kimi_jax.config import ConfigError, ModelConfig, QuantizationConfig, RopeConfig
from kimi_jax.model.transformer import Kimi

KIMI_K25 = ModelConfig(
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
    rope=RopeConfig(factor=64.0, mscale_all_dim=1.0),
    quantization=QuantizationConfig(),
)
EXPERT = "model.layers.1.mlp.experts.2.up_proj"
LAST = "model.layers.2.mlp.experts.3.down_proj"


def vision_tensors() -> dict[str, tuple[int, ...]]:
    """The published vision tower and projector (bf16)."""
    width, inner = 1152, 4304
    out = {
        "vision_tower.patch_embed.proj.weight": (width, 3, 14, 14),
        "vision_tower.patch_embed.proj.bias": (width,),
        "vision_tower.patch_embed.pos_emb.weight": (64, 64, width),
    }
    linears = {"wqkv": (3 * width, width), "wo": (width, width)}
    linears |= {"mlp.fc0": (inner, width), "mlp.fc1": (width, inner)}
    for i in range(27):
        block = f"vision_tower.encoder.blocks.{i}."
        for norm in ("norm0", "norm1"):
            out |= {f"{block}{norm}.weight": (width,), f"{block}{norm}.bias": (width,)}
        for name, shape in linears.items():
            out |= {f"{block}{name}.weight": shape, f"{block}{name}.bias": shape[:1]}
    for norm in ("vision_tower.encoder.final_layernorm", "mm_projector.pre_norm"):
        out |= {f"{norm}.weight": (width,), f"{norm}.bias": (width,)}
    for name, rows in (("mm_projector.proj.0", 4608), ("mm_projector.proj.2", 7168)):
        out |= {f"{name}.weight": (rows, 4608), f"{name}.bias": (rows,)}
    return out


# Full size: names and shapes of the published Kimi-K2.5, without its bytes.


@pytest.fixture(scope="module")
def published():
    return table.expected(KIMI_K25, is_int4=True)


def test_the_published_checkpoint_is_covered_name_by_name(published):
    text = published
    vision = vision_tensors()
    assert len(text) == 208_215 and len(vision) == 335
    assert len(text.keys() | vision.keys()) == 208_550
    assert all(name.startswith(table.VISION_PREFIXES) for name in vision)
    assert not any(name.startswith(table.VISION_PREFIXES) for name in text)
    sizes = {"words": 4, "float": 2, "float32": 4, "shape": 4}
    total = collections.Counter()
    for tensor in text.values():
        total[tensor.kind] += int(np.prod(tensor.shape)) * sizes[tensor.kind]
    assert total["words"] == 507_343_011_840  # 472.5 GiB
    total_vision = sum(2 * int(np.prod(shape)) for shape in vision.values())
    assert round((sum(total.values()) + total_vision) / 2**30, 1) == 554.3


@pytest.mark.parametrize(
    ("name", "shape", "kind"),
    [
        ("model.embed_tokens.weight", (163840, 7168), "float"),
        ("model.norm.weight", (7168,), "float"),
        ("lm_head.weight", (163840, 7168), "float"),
        ("model.layers.60.input_layernorm.weight", (7168,), "float"),
        ("model.layers.60.post_attention_layernorm.weight", (7168,), "float"),
        ("model.layers.0.self_attn.q_a_proj.weight", (1536, 7168), "float"),
        ("model.layers.0.self_attn.q_a_layernorm.weight", (1536,), "float"),
        ("model.layers.0.self_attn.q_b_proj.weight", (12288, 1536), "float"),
        ("model.layers.0.self_attn.kv_a_proj_with_mqa.weight", (576, 7168), "float"),
        ("model.layers.0.self_attn.kv_a_layernorm.weight", (512,), "float"),
        ("model.layers.0.self_attn.kv_b_proj.weight", (16384, 512), "float"),
        ("model.layers.0.self_attn.o_proj.weight", (7168, 8192), "float"),
        ("model.layers.0.mlp.up_proj.weight", (18432, 7168), "float"),
        ("model.layers.0.mlp.down_proj.weight", (7168, 18432), "float"),
        ("model.layers.1.mlp.gate.weight", (384, 7168), "float"),
        ("model.layers.1.mlp.gate.e_score_correction_bias", (384,), "float32"),
        ("model.layers.60.mlp.shared_experts.gate_proj.weight", (2048, 7168), "float"),
        ("model.layers.60.mlp.shared_experts.down_proj.weight", (7168, 2048), "float"),
        ("model.layers.60.mlp.experts.383.gate_proj.weight_packed", (2048, 896), "words"),
        ("model.layers.60.mlp.experts.383.gate_proj.weight_scale", (2048, 224), "float"),
        ("model.layers.60.mlp.experts.383.gate_proj.weight_shape", (2,), "shape"),
        ("model.layers.1.mlp.experts.0.down_proj.weight_packed", (7168, 256), "words"),
        ("model.layers.1.mlp.experts.0.down_proj.weight_scale", (7168, 64), "float"),
    ],
)
def test_published_shapes(published, name, shape, kind):
    assert published[name] == table.Published(shape, kind)


def test_every_value_has_exactly_one_place(published):
    """A name's values are those of its parameters: none twice, none left over."""
    text = published
    shapes = table.weight_shapes(KIMI_K25)
    rows = table.parameters(KIMI_K25, is_int4=True)
    values = collections.Counter()
    for row in rows.values():
        share = int(np.prod(row.shape)) // (row.num_experts or 1)
        for name in row.names():
            values[name] += share
    for name, tensor in text.items():
        size = int(np.prod(tensor.shape)) * (4 if tensor.kind == "words" else 1)
        assert (values[name] == size) != (name in shapes), name
    assert values.keys() | shapes.keys() == text.keys()
    # The one tensor of two parameters: its halves do not overlap.
    k, v = (rows[f"layers.7.self_attn.kv_b_proj_{x}"] for x in "kv")
    assert k.name == v.name and k.split_shape == (64, 256, 512)
    marks = np.zeros(k.split_shape, np.uint8)
    for row in (k, v):
        row.view(marks.__getitem__, (slice(None),) * 3)[...] += 1
    assert (marks == 1).all()


@pytest.mark.parametrize("is_int4", [True, False])
@pytest.mark.parametrize("change", [{}, {"n_shared_experts": 0, "tie_word_embeddings": True}])
def test_parameters_are_those_of_the_model(cfg, is_int4, change):
    cfg = dataclasses.replace(cfg, **change)
    if not is_int4:
        cfg = dataclasses.replace(cfg, quantization=None)
    model = nnx.eval_shape(lambda: Kimi(cfg, dtype=jnp.dtype(jnp.bfloat16), rngs=nnx.Rngs(0)))
    flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
    shapes = {".".join(map(str, path)): tuple(leaf.shape) for path, leaf in flat}
    rows = table.parameters(cfg, is_int4=is_int4)
    assert shapes == {path: row.shape for path, row in rows.items()}


# A checkpoint against the configuration.


def check(folder, cfg):
    return table.check(cfg, CheckpointFiles.open(folder))


def problems_of(folder, cfg) -> str:
    with pytest.raises(CheckpointError) as caught:
        check(folder, cfg)
    assert all(problem in str(caught.value) for problem in caught.value.problems)
    return "\n".join(caught.value.problems)


@pytest.mark.parametrize("prefix", ["", "language_model."])
def test_a_right_checkpoint_gives_a_plan(tensors, save, cfg, plain_cfg, prefix, caplog):
    caplog.set_level(logging.INFO)
    wanted = tensors(cfg, prefix)
    wanted["vision_tower.patch_embed.proj.bias"] = np.zeros(3, np.float32)
    wanted["mm_projector.pre_norm.bias"] = np.zeros(3, np.int8)
    wanted[f"{prefix}model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(2, np.float32)
    plan = check(save(wanted, cfg), cfg)
    assert plan.is_int4 and plan.cfg == cfg
    assert plan.file_names[f"{EXPERT}.weight_scale"] == f"{prefix}{EXPERT}.weight_scale"
    assert len([r for r in caplog.records if "skipping 2 vision tensors" in r.message]) == 1
    plan = check(save(tensors(plain_cfg, prefix), plain_cfg, "plain"), cfg)
    assert not plan.is_int4 and plan.cfg == plain_cfg


@pytest.mark.parametrize("prefix", ["", "language_model."])
def test_prediction_layers_are_skipped(tensors, save, cfg, prefix, caplog):
    """Whatever they are made of: their own projections, blocks of FP8, a second embedding."""
    caplog.set_level(logging.INFO)
    own = tensors(cfg, prefix)
    extra = {
        f"{prefix}model.layers.3.eh_proj.weight": np.zeros((64, 128), ml_dtypes.float8_e4m3fn),
        f"{prefix}model.layers.3.eh_proj.weight_scale_inv": np.zeros((1, 1), np.float32),
        f"{prefix}model.layers.3.embed_tokens.weight": np.zeros((64, 64), np.float32),
        f"{prefix}model.layers.3.mlp.experts.0.up_proj.weight": np.zeros((256, 64), np.float32),
        f"{prefix}model.layers.4.shared_head.norm.weight": np.zeros(64, np.float32),
    }
    folder = save(own | extra, cfg)
    two = dataclasses.replace(cfg, num_nextn_predict_layers=2)
    plan = check(folder, two)
    assert (
        plan.is_int4
        and plan.file_names.keys() == check(save(own, two, "none"), two).file_names.keys()
    )
    assert [r.message for r in caplog.records if "skipping" in r.message] == [
        f"{folder}: skipping 5 multi-token prediction tensors"
    ]
    one = dataclasses.replace(cfg, num_nextn_predict_layers=1)
    text = problems_of(folder, one)
    assert text == f"not part of this model: {prefix}model.layers.4.shared_head.norm.weight"
    text = problems_of(folder, cfg)
    assert f"{prefix}model.layers.3.embed_tokens.weight" in text and "layers.4" in text


def test_ckp_3_missing_tensors_are_named(tensors, save, plain_cfg):
    wanted = tensors(plain_cfg, "language_model.")
    del wanted[f"language_model.{EXPERT}.weight"]
    del wanted["language_model.model.norm.weight"]
    text = problems_of(save(wanted, plain_cfg), plain_cfg)
    assert f"language_model.{EXPERT}.weight" in text and "language_model.model.norm" in text


def test_ckp_3_one_more_layer_in_the_config(tensors, save, cfg):
    more = dataclasses.replace(cfg, num_hidden_layers=4)
    text = problems_of(save(tensors(cfg), cfg), more)
    assert "model.layers.3.input_layernorm.weight" in text and "in all)" in text


def test_ckp_3_one_layer_less_and_unknown_extras(tensors, save, cfg):
    less = dataclasses.replace(cfg, num_hidden_layers=2)
    text = problems_of(save(tensors(cfg), cfg), less)
    assert "not part of this model: " in text and "model.layers.2." in text
    extra = tensors(cfg) | {"model.layers.0.bonus.weight": np.zeros(2, np.float32)}
    text = problems_of(save(extra, cfg, "extra"), cfg)
    assert text == "not part of this model: model.layers.0.bonus.weight"


def test_ckp_3_name_with_and_without_prefix(tensors, save, plain_cfg):
    both = tensors(plain_cfg)
    both["language_model.model.norm.weight"] = both["model.norm.weight"]
    assert "model.norm.weight is there with and without" in problems_of(
        save(both, plain_cfg), plain_cfg
    )


def test_tied_head(tensors, save, plain_cfg):
    tied = dataclasses.replace(plain_cfg, tie_word_embeddings=True)
    assert "lm_head" not in check(save(tensors(tied), tied, "tied"), tied).parameters
    text = problems_of(save(tensors(plain_cfg), plain_cfg, "untied"), tied)
    assert text.startswith("lm_head.weight: present, but tie_word_embeddings")


def test_all_faults_come_at_once(tensors, save, cfg):
    bad = tensors(cfg)
    del bad["model.norm.weight"]
    bad["surplus"] = np.zeros(2, np.float32)
    bad["lm_head.weight"] = bad["lm_head.weight"].T[:5]
    bad["model.embed_tokens.weight"] = np.zeros((64, 64), np.int32)
    bad[f"{EXPERT}.weight_shape"] = np.array([1, 2], np.int32)
    text = problems_of(save(bad, cfg), cfg)
    for part in (
        "missing: model.norm.weight",
        "not part of this model: surplus",
        "lm_head.weight [5, 64], expected [64, 64]",
        "model.embed_tokens.weight is I32, supported: BF16",
        f"{EXPERT}.weight_shape says [1, 2], the words hold [256, 64]",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("dtype", "spelling"),
    [(ml_dtypes.float8_e4m3fn, "F8_E4M3"), (np.int32, "I32"), (np.float64, "F64")],
)
def test_ckp_4_dtype_that_is_no_weight_is_named(tensors, save, plain_cfg, dtype, spelling):
    bad = tensors(plain_cfg)
    bad[f"{EXPERT}.weight"] = np.zeros((256, 64), dtype)
    text = problems_of(save(bad, plain_cfg), plain_cfg)
    assert f"{EXPERT}.weight is {spelling}" in text


def test_ckp_4_rounded_bias_is_accepted_with_a_warning(tensors, save, plain_cfg, caplog):
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    rounded = tensors(plain_cfg)
    assert rounded[name].dtype == np.float32
    rounded[name] = rounded[name].astype(ml_dtypes.bfloat16)
    check(save(rounded, plain_cfg), plain_cfg)
    assert f"{name} (BF16)" in caplog.text


def test_fp8_block_scales_are_refused_once(tensors, save, plain_cfg):
    fp8 = tensors(plain_cfg)
    for name in [name for name in fp8 if name.startswith("model.layers.1.mlp.experts.")]:
        fp8[name] = fp8[name].astype(ml_dtypes.float8_e4m3fn)
        fp8[f"{name}_scale_inv"] = np.zeros((2, 1), np.float32)
    text = problems_of(save(fp8, plain_cfg), plain_cfg)
    assert text.startswith("FP8 block scales are not supported; use the INT4 checkpoint: ")
    assert "\n" not in text and "(12 in all)" in text


# INT-1: odd sizes.


@pytest.mark.parametrize("width", [48, 12, 33])
def test_int_1_width_not_a_multiple_of_the_group(tensors, save, cfg, width):
    odd = tensors(cfg)
    for name in [name for name in odd if ".experts." in name]:
        rows, columns = (width, 64) if "down" not in name else (64, width)
        if name.endswith("weight_packed"):
            odd[name] = np.zeros((rows, -(-columns // 8)), np.int32)
        elif name.endswith("weight_scale"):
            odd[name] = np.zeros((rows, -(-columns // 32)), ml_dtypes.bfloat16)
        else:
            odd[name] = np.array([rows, columns], np.int32)
    narrow = dataclasses.replace(cfg, moe_intermediate_size=width, n_shared_experts=0)
    odd = {name: value for name, value in odd.items() if "shared" not in name}
    text = problems_of(save(odd, narrow), narrow)
    assert text.startswith(f"moe_intermediate_size is {width}: INT4 experts need a multiple")


def test_int_1_weight_shape_and_words_disagree(tensors, save, cfg):
    bad = tensors(cfg)
    bad[f"{LAST}.weight_shape"] = np.array([64, 255], np.int64)
    text = problems_of(save(bad, cfg), cfg)
    assert text == f"weight_shape: {LAST}.weight_shape says [64, 255], the words hold [64, 256]"
    bad = tensors(cfg)
    bad[f"{LAST}.weight_packed"] = bad[f"{LAST}.weight_packed"][:, :-1]
    text = problems_of(save(bad, cfg, "words"), cfg)
    assert f"{LAST}.weight_packed [64, 31], expected [64, 32]" in text


def test_int_1_words_must_be_int32(tensors, save, cfg):
    bad = tensors(cfg)
    bad[f"{LAST}.weight_packed"] = bad[f"{LAST}.weight_packed"].view(np.uint32)
    assert f"{LAST}.weight_packed is U32" in problems_of(save(bad, cfg), cfg)


# INT-2: zero points and reordered columns.


@pytest.mark.parametrize(
    ("leaf", "what"), [("weight_zero_point", "zero points"), ("weight_g_idx", "reordered columns")]
)
def test_int_2_zero_points_and_column_order_are_refused(tensors, save, cfg, leaf, what):
    bad = tensors(cfg) | {f"{EXPERT}.{leaf}": np.zeros((32, 2), np.int32)}
    text = problems_of(save(bad, cfg), cfg)
    assert text == f"INT4 with {what} ({leaf}) is not supported: {EXPERT}"


def test_int_2_asymmetric_config_is_refused(cfg):
    data = cfg.to_dict()
    data["quantization_config"]["config_groups"]["group_0"]["weights"]["symmetric"] = False
    with pytest.raises(ConfigError, match="symmetric"):
        ModelConfig.from_dict(data)


# INT-3: who is INT4, by the files and by the ignore list.


def with_ignore(cfg, *ignore):
    return dataclasses.replace(cfg, quantization=QuantizationConfig(ignore=ignore))


@pytest.mark.parametrize("prefix", ["", "language_model."])
@pytest.mark.parametrize(
    "ignore",
    [
        EXPERT,
        f"language_model.{EXPERT}",
        r"re:.*experts\.2\.up_proj",
        r"re:model\.layers\.1\.mlp\.experts\.2\.up_proj$",
        r"re:language_model\.model\.layers\.1\.mlp\.experts\.2\.up_proj",
    ],
)
def test_int_3_packed_module_on_the_ignore_list(tensors, save, cfg, prefix, ignore):
    text = problems_of(save(tensors(cfg, prefix), cfg), with_ignore(cfg, ignore))
    assert "quantization_config.ignore excludes it" in text and EXPERT in text
    assert "missing" not in text


@pytest.mark.parametrize(
    "ignore", ["model.layers.1.mlp.experts.2", "re:mlp.experts", "lm_head", "re:.*shared_experts.*"]
)
def test_int_3_ignore_entries_that_name_something_else(tensors, save, cfg, ignore):
    assert check(save(tensors(cfg), cfg), with_ignore(cfg, ignore)).is_int4


def test_int_3_ignore_entry_that_is_no_regex(tensors, save, cfg):
    text = problems_of(save(tensors(cfg), cfg), with_ignore(cfg, "re:(", "re:.*lm_head"))
    assert "'re:(' is no regex" in text


def test_int_3_packed_without_a_quantization_config(tensors, save, cfg, plain_cfg):
    text = problems_of(save(tensors(cfg), cfg), plain_cfg)
    assert text.startswith("24 INT4 modules, such as model.layers.1.mlp.experts.0.down_proj")
    assert "no quantization_config" in text and "\n" not in text


@pytest.mark.parametrize(
    "module", ["lm_head", "model.layers.1.mlp.shared_experts.up_proj", "model.layers.0.mlp.up_proj"]
)
def test_int_3_packed_outside_the_routed_experts(tensors, save, cfg, module):
    bad = tensors(cfg)
    del bad[f"{module}.weight"]
    bad[f"{module}.weight_packed"] = np.zeros((8, 8), np.int32)
    bad[f"{module}.weight_scale"] = np.zeros((8, 2), ml_dtypes.bfloat16)
    text = problems_of(save(bad, cfg), with_ignore(cfg))
    assert text == f"INT4 outside the routed experts is not supported: {module}"


def test_int_3_mixture_of_int4_and_plain_experts(tensors, save, cfg):
    mixed = tensors(cfg)
    for module in (EXPERT, LAST):
        for leaf in ("weight_packed", "weight_scale", "weight_shape"):
            del mixed[f"{module}.{leaf}"]
    mixed[f"{EXPERT}.weight"] = np.zeros((256, 64), ml_dtypes.bfloat16)
    mixed[f"{LAST}.weight"] = np.zeros((64, 256), ml_dtypes.bfloat16)
    text = problems_of(save(mixed, cfg), cfg)
    assert text == (
        f"the routed experts are a mixture: all others are INT4, but not: {EXPERT}, {LAST}"
    )


def test_int_3_expert_both_plain_and_packed(tensors, save, cfg):
    both = tensors(cfg) | {f"{EXPERT}.weight": np.zeros((256, 64), ml_dtypes.bfloat16)}
    text = problems_of(save(both, cfg), cfg)
    assert text == f"both weight and weight_packed: {EXPERT}"


def test_int_3_one_scale_a_channel_is_refused(tensors, save, cfg):
    bad = tensors(cfg)
    bad[f"{EXPERT}.weight_scale"] = bad[f"{EXPERT}.weight_scale"][:, :1]
    text = problems_of(save(bad, cfg), cfg)
    assert text == f"shape: {EXPERT}.weight_scale [256, 1], expected [256, 2]"
    data = cfg.to_dict()
    data["quantization_config"]["config_groups"]["group_0"]["weights"]["strategy"] = "channel"
    with pytest.raises(ConfigError, match="strategy"):
        ModelConfig.from_dict(data)
