"""Loading and exporting: bit-exact both ways, from hand-made tensors, and one shard at a time."""

import dataclasses
import tracemalloc

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kernels_pallas.grouped_matmul.layout import nibble_planes, pack_words
from kimi_jax.checkpoint import load, table
from kimi_jax.checkpoint.load import load_params
from kimi_jax.checkpoint.reader import CheckpointError, CheckpointFiles
from kimi_jax.checkpoint.writer import export_params, write_checkpoint

BF16 = np.dtype(ml_dtypes.bfloat16)


class CountingFiles(CheckpointFiles):
    """Counts the bytes every read asks for."""

    reads: list[tuple[str, int]]

    def read_into(self, target, name, first_byte=0):
        super().read_into(target, name, first_byte)
        self.__dict__.setdefault("reads", []).append((name, target.nbytes))


def plan_of(folder, cfg) -> table.Plan:
    plan = table.check(cfg, CountingFiles.open(folder))
    plan.files.reads = []
    return plan


def wanted_of(plan, dtype=BF16, sharding=lambda row: None) -> dict[str, jax.ShapeDtypeStruct]:
    kinds = {"words": np.uint8, "float32": np.float32, "float": dtype}
    return {
        path: jax.ShapeDtypeStruct(row.shape, kinds[row.kind], sharding=sharding(row))
        for path, row in plan.parameters.items()
    }


def assert_same(loaded, params):
    assert loaded.keys() == params.keys()
    for path, value in params.items():
        got = np.asarray(loaded[path])
        assert got.dtype == value.dtype and got.shape == value.shape, path
        assert got.tobytes() == np.asarray(value).tobytes(), path


@pytest.mark.parametrize("prefix", ["", "language_model."])
@pytest.mark.parametrize("is_int4", [True, False])
def test_export_then_load_gives_the_same_bits(
    cfg, plain_cfg, make_params, tmp_path, is_int4, prefix
):
    cfg = cfg if is_int4 else plain_cfg
    params = make_params(cfg)
    exported = export_params(params, cfg, prefix=prefix)
    write_checkpoint(tmp_path, exported, cfg.to_dict(), max_shard_bytes=50_000)
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    plan = plan_of(tmp_path, cfg)
    assert plan.is_int4 == is_int4
    assert_same(load_params(plan, wanted_of(plan), progress=False), params)


def test_layouts_against_plain_indexing(cfg, plain_cfg, tensors, save):
    """Every transform once, by the definition of the published tensors."""
    files = {True: tensors(cfg), False: tensors(plain_cfg)}
    for is_int4, published in files.items():
        plan = plan_of(save(published, cfg, f"int4-{is_int4}"), cfg)
        got = {k: np.asarray(v) for k, v in load_params(plan, wanted_of(plan)).items()}
        at, attn = "layers.2.self_attn.", "model.layers.2.self_attn."
        N, U, R, H, Q = 8, 6, 4, 5, 24

        def same(path, value, got=got):
            assert got[path].tobytes() == np.ascontiguousarray(value).tobytes(), path

        same("embed_tokens", published["model.embed_tokens.weight"])
        same("lm_head", published["lm_head.weight"].T)
        q_b = published[f"{attn}q_b_proj.weight"]
        kv_b = published[f"{attn}kv_b_proj.weight"]
        o = published[f"{attn}o_proj.weight"]
        assert got[f"{at}q_b_proj"].shape == (Q, N, U + R)
        for n in range(N):
            rows = kv_b[n * (U + H) : (n + 1) * (U + H)]
            assert np.array_equal(got[f"{at}kv_b_proj_k"][n], rows[:U])
            assert np.array_equal(got[f"{at}kv_b_proj_v"][n], rows[U:].T)
            q_rows = q_b[n * (U + R) : (n + 1) * (U + R)]
            assert np.array_equal(got[f"{at}q_b_proj"][:, n], q_rows.T)
            assert np.array_equal(got[f"{at}o_proj"][n], o[:, n * H : (n + 1) * H].T)
        same(f"{at}q_a_proj", published[f"{attn}q_a_proj.weight"].T)
        same(f"{at}kv_a_proj_with_mqa", published[f"{attn}kv_a_proj_with_mqa.weight"].T)
        mlp = "model.layers.2.mlp."
        same("layers.2.mlp.gate", published[f"{mlp}gate.weight"].T)
        same(
            "layers.2.mlp.e_score_correction_bias", published[f"{mlp}gate.e_score_correction_bias"]
        )
        same(
            "layers.2.mlp.shared_experts.down_proj",
            published[f"{mlp}shared_experts.down_proj.weight"].T,
        )
        same("layers.0.mlp.up_proj", published["model.layers.0.mlp.up_proj.weight"].T)
        for e in range(4):
            path, name = "layers.2.mlp.experts.down_proj", f"{mlp}experts.{e}.down_proj."
            if is_int4:
                assert np.array_equal(got[f"{path}.scale"][e], published[f"{name}weight_scale"].T)
                low, high = nibble_planes(jnp.asarray(got[f"{path}.packed"][e]))
                words = published[f"{name}weight_packed"].view(np.uint32)
                for k in range(8):
                    q = ((words >> np.uint32(4 * k)) & np.uint32(0xF)).astype(np.int8) - 8
                    plane = low if k % 2 == 0 else high
                    assert np.array_equal(np.asarray(plane)[k // 2 :: 4].T, q)
            else:
                assert np.array_equal(got[path][e], published[f"{name}weight"].T)


def test_int4_extremes_survive(cfg, tensors, save):
    published = tensors(cfg)
    name = "model.layers.1.mlp.experts.0.gate_proj.weight_packed"
    q = np.resize(np.arange(-8, 8, dtype=np.int8), published[name].shape[:1] + (64,))
    published[name] = pack_words(q)
    assert (published[name] < 0).any()
    plan = plan_of(save(published, cfg), cfg)
    packed = load_params(plan, wanted_of(plan))["layers.1.mlp.experts.gate_proj.packed"]
    low, high = nibble_planes(packed[0])
    assert np.array_equal(np.asarray(low).T, q[:, 0::2])
    assert np.array_equal(np.asarray(high).T, q[:, 1::2])


# Sharded loading: every axis that 8 devices divide, in turn from the left and from the right.


def shard_axis(row, side: int, ways: int, axis_name: str) -> PartitionSpec:
    places = [i for i, size in enumerate(row.shape) if size % ways == 0]
    names = [None] * len(row.shape)
    if places:
        names[places[-1 if side else 0]] = axis_name
    return PartitionSpec(*names)


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("is_int4", [True, False])
def test_8_devices_load_what_1_device_loads(cfg, plain_cfg, make_params, tmp_path, is_int4, side):
    cfg = cfg if is_int4 else plain_cfg
    params = make_params(cfg)
    write_checkpoint(tmp_path, export_params(params, cfg), cfg.to_dict())
    plan = plan_of(tmp_path, cfg)
    mesh = Mesh(np.array(jax.devices()[:8]), ("x",))
    wanted = wanted_of(
        plan, sharding=lambda row: NamedSharding(mesh, shard_axis(row, side, 8, "x"))
    )
    loaded = load_params(plan, wanted, progress=False)
    assert_same(loaded, params)
    for path, row in plan.parameters.items():
        shard_shape = wanted[path].sharding.shard_shape(row.shape)
        assert [s.data.shape for s in loaded[path].addressable_shards] == [shard_shape] * 8
    # Each byte of a tensor was read once, whichever devices share it.
    assert_read_once(plan)


def assert_read_once(plan):
    sizes: dict[str, int] = {}
    for name, size in plan.files.reads:
        sizes[name] = sizes.get(name, 0) + size
    wanted = {plan.file_names[n]: 0 for row in plan.parameters.values() for n in row.names()}
    for row in plan.parameters.values():
        for name in row.names():
            # Both halves of kv_b_proj read their heads whole.
            wanted[plan.file_names[name]] += plan.files.tensors[plan.file_names[name]].num_bytes
    assert sizes == wanted


class OneDeviceOf8(jax.sharding.Sharding):
    """What a process sees that owns one device of a mesh of eight."""

    def __init__(self, whole, device):
        self._whole, self._device = whole, device

    def check_compatible_aval(self, shape):
        self._whole.check_compatible_aval(shape)

    def addressable_devices_indices_map(self, shape):
        return {self._device: self._whole.devices_indices_map(shape)[self._device]}


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("is_int4", [True, False])
def test_a_process_reads_the_rows_its_devices_need(
    cfg, plain_cfg, make_params, tmp_path, monkeypatch, is_int4, side
):
    cfg = cfg if is_int4 else plain_cfg
    params = make_params(cfg)
    write_checkpoint(tmp_path, export_params(params, cfg), cfg.to_dict())
    plan = plan_of(tmp_path, cfg)
    mesh = Mesh(np.array(jax.devices()[:8]), ("x",))
    device = jax.devices()[5]
    kept = {}

    def keep(shape, sharding, callback, dtype):
        [(_, index)] = sharding.addressable_devices_indices_map(shape).items()
        return jnp.asarray(np.array(callback(index)))

    monkeypatch.setattr(jax, "make_array_from_callback", keep)
    wanted = {}
    for path, leaf in wanted_of(plan).items():
        row = plan.parameters[path]
        whole = NamedSharding(mesh, shard_axis(row, side, 8, "x"))
        wanted[path] = jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=OneDeviceOf8(whole, device)
        )
        kept[path] = params[path][whole.devices_indices_map(row.shape)[device]]
    assert_same(load_params(plan, wanted, progress=False), kept)
    for path, row in plan.parameters.items():
        first_axis_is_cut = kept[path].shape[-len(row.order) :][row.order.index(0)]
        share = first_axis_is_cut / row.shape[-len(row.order) :][row.order.index(0)]
        names = {plan.file_names[name] for name in row.names()}
        if len(names) == row.num_experts:
            share *= kept[path].shape[0] / row.num_experts
        if row.name.endswith("kv_b_proj.weight") or share == 1:
            continue
        stored = sum(plan.files.tensors[name].num_bytes for name in names)
        assert sum(n for name, n in plan.files.reads if name in names) == share * stored, path


@pytest.mark.slow
@pytest.mark.parametrize("block", [1, 100, 1 << 14, 1 << 22])
@pytest.mark.parametrize("with_xla", [True, False])
def test_blocks_of_any_size_give_the_same_bits(
    cfg, make_params, tmp_path, monkeypatch, block, with_xla
):
    params = make_params(cfg)
    write_checkpoint(tmp_path, export_params(params, cfg), cfg.to_dict())
    plan = plan_of(tmp_path, cfg)
    monkeypatch.setattr(load, "_SMALLEST_BLOCK", block)
    monkeypatch.setattr(load, "_LARGEST_BLOCK", block)
    monkeypatch.setattr(load, "_SMALLEST_FOR_XLA", 1)
    if not with_xla:
        monkeypatch.setattr(load, "_cpu_device", lambda: None)
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("e", "f"))
    expert = PartitionSpec("e", None, "f")
    wanted = wanted_of(
        plan,
        sharding=lambda row: NamedSharding(mesh, expert if row.num_experts else PartitionSpec()),
    )
    assert_same(load_params(plan, wanted, progress=False), params)


def test_a_file_that_shrinks_while_it_is_read_is_named(cfg, make_params, tmp_path):
    write_checkpoint(tmp_path, export_params(make_params(cfg), cfg), cfg.to_dict())
    plan = plan_of(tmp_path, cfg)
    path = tmp_path / "model.safetensors"
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)
    with pytest.raises(CheckpointError, match=r"model.safetensors: ends at byte \d+"):
        load_params(plan, wanted_of(plan), progress=False)


def test_copies_of_a_shard_are_read_once(cfg, make_params, tmp_path):
    params = make_params(cfg)
    write_checkpoint(tmp_path, export_params(params, cfg), cfg.to_dict())
    plan = plan_of(tmp_path, cfg)
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("data", "x"))
    wanted = wanted_of(plan, sharding=lambda row: NamedSharding(mesh, shard_axis(row, 1, 4, "x")))
    assert_same(load_params(plan, wanted, progress=False), params)
    assert_read_once(plan)


def test_experts_shared_out_whole(cfg, make_params, tmp_path):
    params = make_params(cfg)
    write_checkpoint(tmp_path, export_params(params, cfg), cfg.to_dict())
    plan = plan_of(tmp_path, cfg)
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("e", "f"))
    expert = PartitionSpec("e", None, "f")
    wanted = wanted_of(
        plan,
        sharding=lambda row: NamedSharding(mesh, expert if row.num_experts else PartitionSpec()),
    )
    loaded = load_params(plan, wanted, progress=False)
    assert_same(loaded, params)
    packed = loaded["layers.1.mlp.experts.up_proj.packed"]
    assert {s.data.shape for s in packed.addressable_shards} == {(1, 32, 128)}


# dtypes (CKP-4).


def test_ckp_4_float32_is_kept_where_bfloat16_is_usual(plain_cfg, make_params, tmp_path):
    params = make_params(plain_cfg, dtype=np.float32)
    write_checkpoint(tmp_path, export_params(params, plain_cfg), {})
    plan = plan_of(tmp_path, plain_cfg)
    assert_same(load_params(plan, wanted_of(plan, np.float32), progress=False), params)
    rounded = load_params(plan, wanted_of(plan, BF16), progress=False)
    assert_same(rounded, {k: as_model(k, v, BF16) for k, v in params.items()})


@pytest.mark.parametrize("stored", [BF16, np.dtype(np.float16)])
def test_ckp_4_stored_halves_are_exact_in_float32(plain_cfg, make_params, tmp_path, stored):
    params = make_params(plain_cfg, dtype=stored)
    write_checkpoint(tmp_path, export_params(params, plain_cfg), {})
    plan = plan_of(tmp_path, plain_cfg)
    loaded = load_params(plan, wanted_of(plan, np.float32), progress=False)
    assert_same(loaded, {k: v.astype(np.float32) for k, v in params.items()})


def as_model(path, value, dtype):
    return value if "bias" in path else value.astype(dtype)


def test_ckp_4_router_bias_stays_float32(cfg, make_params, tmp_path):
    path = "layers.1.mlp.e_score_correction_bias"
    params = make_params(cfg)
    params[path] = (7 + 0.01 * np.arange(4)).astype(np.float32)
    write_checkpoint(tmp_path, export_params(params, cfg, dtype=BF16), {})
    plan = plan_of(tmp_path, cfg)
    loaded = load_params(plan, wanted_of(plan), progress=False)
    assert loaded[path].dtype == jnp.float32 and len(set(loaded[path].tolist())) == 4
    wanted = wanted_of(plan)
    wanted[path] = jax.ShapeDtypeStruct((4,), jnp.bfloat16)
    with pytest.raises(ValueError, match=f"{path} cannot be loaded as bfloat16"):
        load_params(plan, wanted)


def test_wanted_must_be_the_parameters_of_the_checkpoint(cfg, make_params, tmp_path):
    write_checkpoint(tmp_path, export_params(make_params(cfg), cfg), {})
    plan = plan_of(tmp_path, cfg)
    wanted = wanted_of(plan)
    del wanted["norm"]
    wanted["surplus"] = wanted["lm_head"] = jax.ShapeDtypeStruct((3,), BF16)
    wanted["layers.1.mlp.experts.up_proj.packed"] = jax.ShapeDtypeStruct((4, 32, 256), np.int8)
    with pytest.raises(ValueError) as caught:
        load_params(plan, wanted)
    for part in (
        "no surplus",
        "no norm",
        "lm_head is [3] in the model, [64, 64] in the table",
        "up_proj.packed cannot be loaded as int8",
    ):
        assert part in str(caught.value)
    assert plan.files.reads == []


# Memory.


def test_the_host_holds_one_parameter_at_a_time(plain_cfg, make_params, tmp_path):
    """Peak beyond the arrays themselves: about the largest parameter, in float32 from bfloat16."""
    cfg = dataclasses.replace(
        plain_cfg, vocab_size=2048, hidden_size=256, moe_intermediate_size=512, num_hidden_layers=5
    )
    params = make_params(cfg)
    write_checkpoint(tmp_path, export_params(params, cfg), {}, max_shard_bytes=2_000_000)
    largest = 4 * max(value.size for value in params.values())
    total = 4 * sum(value.size for value in params.values())
    del params
    plan = plan_of(tmp_path, cfg)
    wanted = wanted_of(plan, np.float32)
    tracemalloc.start()
    loaded = load_params(plan, wanted, progress=False)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert largest < total / 8
    # On CPU the arrays may be NumPy's own memory, so they are counted too.
    assert peak < total + 1.3 * largest + 2_000_000
    assert sum(array.nbytes for array in loaded.values()) == total


def test_progress_stays_off_outside_a_terminal(cfg, make_params, tmp_path, capsys):
    write_checkpoint(tmp_path, export_params(make_params(cfg), cfg), {})
    plan = plan_of(tmp_path, cfg)
    load_params(plan, wanted_of(plan))
    out, err = capsys.readouterr()
    assert out == "" and err == ""
