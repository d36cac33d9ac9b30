"""Drafter files: right ones are read exactly, wrong ones are named (SPC-6, SPC-7, W-2)."""

import dataclasses
import logging

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from make_random_drafter import random_drafter, tiny_drafter_config, write_random_drafter
from spec_options import TARGET

from kimi_jax.checkpoint.writer import write_checkpoint
from spec.eagle3 import checkpoint
from spec.eagle3.checkpoint import MAP, check_target, open_drafter, write_drafter
from spec.eagle3.config import DrafterConfig, DrafterError

V, D = TARGET.vocab_size, TARGET.hidden_size
KINDS = pytest.mark.parametrize("kind", ["llama", "mla"])
W = V // 4


@pytest.fixture
def spoil(tmp_path):
    """Writes a drafter whose published tensors `change` has had its hands on."""

    def spoil(cfg: DrafterConfig, change, *, layer_prefix: str = "midlayer.", **kwargs):
        write_random_drafter(tmp_path / "good", cfg, layer_prefix=layer_prefix, **kwargs)
        path = tmp_path / "good" / "model.safetensors"
        tensors = safetensors.numpy.load_file(path)
        change(tensors)
        write_checkpoint(tmp_path / "bad", tensors.items(), cfg.to_dict())
        return tmp_path / "bad"

    return spoil


def problems_of(folder, cfg: DrafterConfig) -> str:
    with pytest.raises(DrafterError) as caught:
        open_drafter(folder, cfg)
    assert str(folder) in str(caught.value)
    return "\n".join(caught.value.problems)


def renamed(tensors: dict, rename) -> None:
    for name in list(tensors):
        tensors[rename(name)] = tensors.pop(name)


# What is right.


@KINDS
@pytest.mark.parametrize("layer_prefix", ["midlayer.", "layers.0."])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_written_drafters_are_read_back(tmp_path, kind, layer_prefix, dtype):
    cfg = tiny_drafter_config(kind, TARGET)
    arrays = write_random_drafter(tmp_path, cfg, layer_prefix=layer_prefix, dtype=dtype)
    assert DrafterConfig.from_folder(tmp_path, num_target_layers=3) == cfg
    names = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    assert f"{layer_prefix}hidden_norm.weight" in names
    files = open_drafter(tmp_path, cfg)
    assert files.has_own_embedding and files.has_own_head
    assert files.has_map == (MAP in arrays) == (kind == "llama")
    assert files.paths() == {path: value.shape for path, value in arrays.items()}
    for path, value in arrays.items():
        got = files.read(path)
        assert got.dtype == value.dtype
        np.testing.assert_array_equal(got, value)


def test_published_shapes_and_splits(tmp_path):
    """The published tensors of both styles, with the axes where EAGLE and SpecForge have them."""
    llama = tiny_drafter_config("llama", TARGET)
    arrays = write_random_drafter(tmp_path / "llama", llama)
    stored = safetensors.numpy.load_file(tmp_path / "llama" / "model.safetensors")
    N, P, H = 4, 2, 8
    assert stored["fc.weight"].shape == (D, 3 * D)
    assert stored["midlayer.self_attn.q_proj.weight"].shape == (N * H, 2 * D)
    assert stored["midlayer.self_attn.k_proj.weight"].shape == (P * H, 2 * D)
    np.testing.assert_array_equal(
        stored["midlayer.self_attn.q_proj.weight"].reshape(N, H, 2 * D),
        arrays["self_attn.q_proj"].transpose(1, 2, 0),
    )
    np.testing.assert_array_equal(
        stored["midlayer.self_attn.o_proj.weight"], arrays["self_attn.o_proj"].reshape(N * H, D).T
    )
    np.testing.assert_array_equal(stored["lm_head.weight"], arrays["lm_head"].T)
    np.testing.assert_array_equal(stored["d2t"] + np.arange(W), arrays[MAP])
    np.testing.assert_array_equal(np.flatnonzero(stored["t2d"]), arrays[MAP])
    assert (stored["d2t"].dtype, stored["t2d"].dtype) == (np.int64, np.bool_)

    mla = tiny_drafter_config("mla", TARGET)
    arrays = write_random_drafter(tmp_path / "mla", mla)
    stored = safetensors.numpy.load_file(tmp_path / "mla" / "model.safetensors")
    U, R, H, C = 6, 4, 5, 16
    assert stored["midlayer.self_attn.kv_a_proj_with_mqa.weight"].shape == (C + R, 2 * D)
    kv_b = stored["midlayer.self_attn.kv_b_proj.weight"].reshape(N, U + H, C)
    np.testing.assert_array_equal(kv_b[:, :U], arrays["self_attn.kv_b_proj_k"])
    np.testing.assert_array_equal(kv_b[:, U:].swapaxes(1, 2), arrays["self_attn.kv_b_proj_v"])
    assert len(stored) == 17 and "d2t" not in stored


@pytest.mark.parametrize(
    ("changes", "paths"),
    [
        ({"fc_norm": True}, {"fc_norm.0": (96,), "fc_norm.2": (96,), "fc": (288, D)}),
        ({"norm_before_fc": True}, {"input_norm": (288,), "fc": (288, D)}),
    ],
)
def test_norms_before_fc(tmp_path, changes, paths):
    cfg = tiny_drafter_config("mla", TARGET, target_hidden_size=96, **changes)
    write_random_drafter(tmp_path, cfg)
    assert paths.items() <= open_drafter(tmp_path, cfg).paths().items()


def test_without_auxiliary_states_there_is_no_fc(tmp_path):
    cfg = tiny_drafter_config("llama", TARGET, use_aux_hidden_state=False)
    write_random_drafter(tmp_path, cfg)
    assert "fc" not in open_drafter(tmp_path, cfg).paths()


@KINDS
def test_w_2_names_after_model(spoil, kind):
    cfg = tiny_drafter_config(kind, TARGET)
    for prefix in ("midlayer.", "layers.0."):
        arrays = random_drafter(cfg)
        folder = spoil(cfg, lambda t: renamed(t, lambda n: f"model.{n}"), layer_prefix=prefix)
        files = open_drafter(folder, cfg)
        assert files.paths().keys() == arrays.keys()
        np.testing.assert_array_equal(files.read("fc"), arrays["fc"])
        for path in (folder, folder.parent / "good"):
            (path / "model.safetensors").unlink()


def test_derived_tables_and_a_missing_t2d_do_not_matter(spoil):
    cfg = tiny_drafter_config("llama", TARGET)

    def change(tensors):
        tensors["midlayer.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
        del tensors["t2d"]

    assert open_drafter(spoil(cfg, change), cfg).has_map


def test_a_map_of_zeros_is_no_map_where_the_vocabulary_is_whole(spoil):
    cfg = tiny_drafter_config("mla", TARGET)

    def change(tensors):
        tensors["d2t"] = np.zeros(V, np.int64)
        tensors["t2d"] = np.ones(V, np.bool_)

    files = open_drafter(spoil(cfg, change), cfg)
    assert not files.has_map and MAP not in files.paths()


@KINDS
def test_norms_may_be_stored_wider(spoil, kind):
    cfg = tiny_drafter_config(kind, TARGET)

    def change(tensors):
        tensors["norm.weight"] = tensors["norm.weight"].astype(np.float32)

    files = open_drafter(spoil(cfg, change, dtype="bfloat16"), cfg)
    assert files.read("norm").dtype == np.float32
    assert files.read("fc").dtype == ml_dtypes.bfloat16


# Borrowing from the target.


def test_an_absent_embedding_is_borrowed(tmp_path, caplog):
    cfg = tiny_drafter_config("llama", TARGET)
    write_random_drafter(tmp_path, cfg, own_embedding=False)
    with caplog.at_level(logging.INFO):
        files = open_drafter(tmp_path, cfg)
    assert not files.has_own_embedding and "embed_tokens" not in files.paths()
    assert "target's embedding" in caplog.text


def test_an_absent_embedding_of_another_width_is_refused(spoil):
    cfg = tiny_drafter_config("llama", TARGET, target_hidden_size=96)
    folder = spoil(cfg, lambda tensors: tensors.pop("embed_tokens.weight"))
    assert "embed_tokens.weight is missing" in problems_of(folder, cfg)


def test_spc_7_an_absent_head_is_borrowed_with_a_notice(tmp_path, caplog):
    cfg = tiny_drafter_config("mla", TARGET)
    write_random_drafter(tmp_path, cfg, own_head=False)
    files = open_drafter(tmp_path, cfg)
    assert not files.has_own_head and "lm_head" not in files.paths()
    assert "target's head" in caplog.text


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"draft_vocab_size": W}, f"{W} draft ids of {V}"), ({"target_hidden_size": 96}, "width 64")],
)
def test_spc_7_an_absent_head_that_cannot_be_borrowed(spoil, changes, said):
    cfg = tiny_drafter_config("mla", TARGET, **changes)
    folder = spoil(cfg, lambda tensors: tensors.pop("lm_head.weight"))
    text = problems_of(folder, cfg)
    assert "lm_head.weight is missing" in text and said in text


# Maps (SPC-6).


def spoilt_map(kind: str, offsets: np.ndarray) -> np.ndarray:
    offsets = offsets.copy()
    if kind == "all zero":
        offsets[:] = 0
    elif kind == "outside":
        offsets[-1] += V
    elif kind == "negative":
        offsets[0] = -1
    elif kind == "duplicate":
        offsets[1] = offsets[0] - 1
    elif kind == "descending":
        ids = offsets + np.arange(W)
        ids[[3, 4]] = ids[[4, 3]]
        offsets = ids - np.arange(W)
    elif kind == "ids, not offsets":
        offsets += np.arange(W)
    elif kind == "short":
        offsets = offsets[:-1]
    elif kind == "float":
        return offsets.astype(np.float32)
    return offsets


@pytest.mark.parametrize("has_mask", [True, False])
@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("all zero", "d2t is all zero"),
        ("outside", f"outside the target's {V} ids: {W - 1} to"),
        ("negative", "0 to -1"),
        ("duplicate", "more than one draft id"),
        ("descending", "not ascending, first at draft id 4"),
        ("ids, not offsets", "outside"),
        ("short", f"d2t [{W - 1}], expected [{W}]"),
        ("float", "d2t is F32"),
    ],
)
def test_spc_6_bad_maps_are_refused(spoil, kind, said, has_mask):
    cfg = tiny_drafter_config("llama", TARGET)

    def change(tensors):
        tensors["d2t"] = spoilt_map(kind, tensors["d2t"])
        if not has_mask:
            del tensors["t2d"]

    assert said in problems_of(spoil(cfg, change), cfg)


def test_spc_6_a_missing_map_is_refused(spoil):
    cfg = tiny_drafter_config("llama", TARGET)
    assert "d2t is missing" in problems_of(spoil(cfg, lambda t: t.pop("d2t")), cfg)


def test_spc_6_a_map_for_a_whole_vocabulary_must_be_the_identity(spoil):
    cfg = tiny_drafter_config("mla", TARGET)

    def change(tensors):
        tensors["d2t"] = np.zeros(V, np.int64)
        tensors["d2t"][:2] = [1, -1]

    assert "not ascending" in problems_of(spoil(cfg, change), cfg)


def test_a_mask_that_says_something_else_is_refused(spoil):
    cfg = tiny_drafter_config("llama", TARGET)

    def change(tensors):
        tensors["t2d"][V - 1] = False

    assert f"t2d disagrees with d2t at target ids {V - 1}" in problems_of(spoil(cfg, change), cfg)


def test_a_mask_of_another_length_is_refused(spoil):
    cfg = tiny_drafter_config("llama", TARGET)

    def change(tensors):
        tensors["t2d"] = tensors["t2d"][:-1]

    assert f"t2d [{V - 1}], expected [{V}]" in problems_of(spoil(cfg, change), cfg)


# Tensors that are not the configuration's.


def test_everything_wrong_is_named_at_once(spoil):
    cfg = tiny_drafter_config("llama", TARGET)

    def change(tensors):
        tensors["layers.0.self_attn.q_proj.bias"] = np.zeros(4, np.float32)
        tensors["lm_head.weight"] = tensors["lm_head.weight"][:, :-1]
        tensors["norm.weight"] = tensors["norm.weight"].astype(np.float64)
        tensors["model.hidden.weight"] = tensors.pop("layers.0.hidden_norm.weight")
        tensors["midlayer.mlp.up_proj.weight"] = tensors["layers.0.mlp.up_proj.weight"]
        tensors["d2t"][0] = -5

    text = problems_of(spoil(cfg, change, layer_prefix="layers.0."), cfg)
    for said in (
        "not part of this drafter: layers.0.self_attn.q_proj.bias",
        "model.hidden.weight",
        f"lm_head.weight [{W}, {D - 1}], expected [{W}, {D}]",
        "norm.weight is F64",
        "missing: layers.0.hidden_norm.weight",
        "layers.0.mlp.up_proj.weight",
        "are the same tensor",
        "d2t takes draft ids outside",
    ):
        assert said in text


@pytest.mark.parametrize(
    ("written", "read", "said"),
    [
        ({"norm_before_fc": True}, {}, "input_norm.weight is there, but norm_before_fc is false"),
        ({"fc_norm": True}, {}, "fc_norm.2.weight is there, but fc_norm is false"),
        ({}, {"norm_before_fc": True}, "missing: input_norm.weight"),
        ({}, {"fc_norm": True}, "missing: fc_norm.0.weight, fc_norm.1.weight, fc_norm.2.weight"),
        ({}, {"use_aux_hidden_state": False}, "fc.weight is there, but use_aux_hidden_state"),
        ({"use_aux_hidden_state": False}, {}, "missing: fc.weight"),
        ({"taps": (0, 3)}, {}, f"fc.weight [{D}, {2 * D}], expected [{D}, {3 * D}]"),
        ({}, {"hidden_size": D + 8, "target_hidden_size": D + 8}, f"norm.weight [{D}]"),
        ({}, {"vocab_size": V - 1}, f"embed_tokens.weight [{V}, {D}], expected [{V - 1}, {D}]"),
    ],
)
def test_variants_and_files_must_agree(tmp_path, written, read, said):
    write_random_drafter(tmp_path, tiny_drafter_config("mla", TARGET, **written))
    assert said in problems_of(tmp_path, tiny_drafter_config("mla", TARGET, **read))


def test_the_other_style_is_refused(tmp_path):
    write_random_drafter(tmp_path, tiny_drafter_config("llama", TARGET))
    text = problems_of(tmp_path, tiny_drafter_config("mla", TARGET, draft_vocab_size=W))
    assert "midlayer.self_attn.q_a_proj.weight" in text and "midlayer.self_attn.q_proj" in text


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.1.input_layernorm.weight",
        "model.layers.0.mlp.experts.0.up_proj.weight",
        "language_model.model.norm.weight",
    ],
)
def test_spc_7_the_target_as_its_own_drafter(tmp_path, name):
    tensors = {name: np.ones(4, np.float32), "lm_head.weight": np.ones((V, D), np.float32)}
    write_checkpoint(tmp_path, tensors.items(), {})
    text = problems_of(tmp_path, tiny_drafter_config("llama", TARGET))
    assert "a target checkpoint, not a drafter" in text and name in text


def test_quantised_tensors_are_refused_by_name(spoil):
    cfg = tiny_drafter_config("mla", TARGET)

    def change(tensors):
        weight = tensors.pop("midlayer.mlp.up_proj.weight")
        tensors["midlayer.mlp.up_proj.weight"] = weight.astype(ml_dtypes.float8_e4m3fn)
        tensors["midlayer.mlp.up_proj.weight_scale"] = np.ones(1, np.float32)

    assert "quantised drafters are not supported" in problems_of(spoil(cfg, change), cfg)


# Folders.


def test_pickled_weights_are_refused(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK")
    text = problems_of(tmp_path, tiny_drafter_config("llama", TARGET))
    assert "pytorch_model.bin" in text and "convert to safetensors" in text


def test_broken_folders_are_named(tmp_path):
    cfg = tiny_drafter_config("llama", TARGET)
    assert "no such folder" in problems_of(tmp_path / "nowhere", cfg)
    assert "model.safetensors" in problems_of(tmp_path, cfg)
    (tmp_path / "model.safetensors").write_bytes(b"abc")
    assert "truncated" in problems_of(tmp_path, cfg)


# Against the target.


def test_spc_7_another_targets_drafter():
    cfg = tiny_drafter_config("llama", TARGET)
    check_target(cfg, TARGET)
    other = dataclasses.replace(
        TARGET, vocab_size=V - 1, hidden_size=D + 8, num_hidden_layers=2, first_k_dense_replace=1
    )
    with pytest.raises(DrafterError) as caught:
        check_target(cfg, other)
    for said in (f"vocab_size is {V}", f"hidden_size is {D + 8}", "taps [3]", "2 layers"):
        assert said in str(caught.value)


# Writing.


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda a: a.pop("fc"), "missing: fc"),
        (lambda a: a.pop(MAP), f"missing: {MAP}"),
        (lambda a: a.pop("lm_head"), "lm_head.weight is missing"),
        (lambda a: a.update(other=a["norm"]), "not part of this drafter: other"),
        (lambda a: a.update(norm=a["norm"][:-1]), f"norm [{D - 1}], expected [{D}]"),
        (lambda a: a.update(norm=a["norm"].astype(np.float64)), "norm is float64"),
        (lambda a: a.update({MAP: np.arange(W)}), "all zero"),
    ],
)
def test_nothing_is_written_that_would_not_be_read(tmp_path, change, said):
    cfg = tiny_drafter_config("llama", TARGET)
    arrays = random_drafter(cfg)
    change(arrays)
    with pytest.raises(DrafterError) as caught:
        write_drafter(tmp_path / "out", cfg, arrays)
    assert said in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_writing_over_another_drafter_is_asked_for(tmp_path):
    cfg = tiny_drafter_config("mla", TARGET)
    write_random_drafter(tmp_path, cfg)
    arrays = random_drafter(cfg, seed=1, own_embedding=False)
    with pytest.raises(FileExistsError):
        write_drafter(tmp_path, cfg, arrays)
    write_drafter(tmp_path, cfg, arrays, layer_prefix="layers.0.", overwrite=True)
    files = open_drafter(tmp_path, cfg)
    assert not files.has_own_embedding
    np.testing.assert_array_equal(files.read("fc"), arrays["fc"])
    with pytest.raises(ValueError, match="layer_prefix"):
        write_drafter(tmp_path, cfg, arrays, layer_prefix="layer.")


@KINDS
def test_full_size_names_and_shapes_are_the_published_ones(kind):
    """Kimi-K2.5's drafters, by the parameter counts on their cards."""
    target = dataclasses.replace(TARGET, vocab_size=163840, hidden_size=7168, num_hidden_layers=61)
    sizes = {"taps": (2, 30, 58), "intermediate_size": 18432, "num_attention_heads": 64}
    if kind == "llama":
        sizes |= {"draft_vocab_size": 32000, "num_key_value_heads": 64, "head_dim": 128}
    else:
        sizes |= {"q_lora_rank": 1536, "kv_lora_rank": 512, "v_head_dim": 128}
        sizes |= {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
    cfg = tiny_drafter_config(kind, target, **sizes)
    rows = checkpoint.parameters(cfg, has_own_embedding=True, has_own_head=True)
    total = sum(int(np.prod(row.shape)) for row in rows.values())
    assert round(total / 1e9, 3) == {"llama": 2.365, "mla": 3.016}[kind]
