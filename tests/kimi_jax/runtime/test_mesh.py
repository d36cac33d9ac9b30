"""One device and eight give the same; what does not fit is refused with what would.

Devices add in another order: 1e-5 of the largest logit.
"""

import dataclasses
import logging

import jax
import numpy as np
import oracles
import pytest
from jax.sharding import Mesh
from make_random_checkpoint import preset_config

from kimi_jax.runtime import engine as engines
from kimi_jax.runtime import mesh as meshes
from kimi_jax.runtime.conditions import num_compiles
from kimi_jax.runtime.llm import LLM
from kimi_jax.runtime.mesh import (
    MeshError,
    check_cache,
    check_sizes,
    make_mesh,
    parse_mesh,
)

pytestmark = pytest.mark.usefixtures("quick_compiles")

# `expert=8` alone is tried layer by layer (model/test_sharded.py).
INT4_MESHES = ("tensor=8", "expert=2,tensor=4")


@pytest.fixture(scope="module")
def behaviour(ids, on):
    """Logits, and tokens of three rows: greedy, and sampled with every filter and penalty."""

    def behaviour(llm):
        prompts = [ids(9, 2), ids(1), ids(16, 3)]
        sampled = on(
            20,
            temperature=1.0,
            seed=7,
            top_k=50,
            top_p=0.95,
            min_p=0.01,
            repetition_penalty=1.1,
            frequency_penalty=0.5,
            logit_bias={3: 1.0, 400: 2.0},
            logprobs=3,
        )
        results = llm.generate(prompts, [on(20, logprobs=3), sampled, on(12, logprobs=3)])
        logprobs = [e.logprob for r in results for e in r.logprobs]
        top_ids = [[i for i, _ in e.top] for r in results for e in r.logprobs]
        return llm.logits(ids(12)), [r.token_ids for r in results], logprobs, top_ids

    return behaviour


def check_same(found, expected) -> None:
    logits, tokens, logprobs, top_ids = found
    scale = np.abs(expected[0]).max()
    np.testing.assert_allclose(logits, expected[0], atol=1e-5 * scale)
    assert tokens == expected[1]
    np.testing.assert_allclose(logprobs, expected[2], atol=1e-4)
    assert top_ids == expected[3]


@pytest.fixture(scope="module")
def whole(llm, behaviour):
    return behaviour(llm)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", INT4_MESHES)
def test_int4_experts_on_eight_devices(make_llm, behaviour, whole, mesh):
    llm = make_llm(mesh)
    assert llm.mesh.size == 8
    check_same(behaviour(llm), whole)
    before = num_compiles()
    check_same(behaviour(llm), whole)
    assert num_compiles() == before


def test_unpacked_experts_on_eight_devices(make_llm, make_folder, ids, on):
    """Against the float64 oracle, which saves compiling for one device."""
    llm = make_llm("expert=2,tensor=4", experts="bf16")
    config, tensors = oracles.read_checkpoint(make_folder(experts="bf16"))
    results = llm.generate([ids(9, 2), ids(1), ids(16, 3)], on(12))
    for prompt, result in zip([ids(9, 2), ids(1), ids(16, 3)], results, strict=True):
        expected = oracles.forward(tensors, config, [*prompt, *result.token_ids]).logits
        assert result.token_ids == tuple(expected[len(prompt) - 1 : -1].argmax(axis=-1))
    expected = oracles.forward(tensors, config, ids(12)).logits
    np.testing.assert_allclose(llm.logits(ids(12)), expected, atol=1e-4)


@pytest.mark.slow
def test_a_cache_shared_out_over_the_devices(
    make_llm, llm, monkeypatch, ids, on, assert_close_to_scale
):
    """Also as it grows, which moves nothing, and as rows that end take the next request."""
    monkeypatch.setattr(engines, "GROW_FROM", 256)
    shared = make_llm("tensor=8", cache="sequence", max_length=320, max_batch=2)
    layer = shared.engine.abstract_state(2, 256).cache.layers[0]
    assert layer.sharding.shard_shape(layer.shape) == (2 * 256 // 8, layer.shape[1])
    prompts = [ids(180), ids(3, 1), ids(40, 2), ids(9, 3), ids(1, 4)]
    params = [on(n, temperature=0.8, seed=3) for n in (130, 7, 20, 1, 12)]
    ours, theirs = (each.generate(prompts, params) for each in (shared, llm))
    assert [r.token_ids for r in ours] == [r.token_ids for r in theirs]
    assert_close_to_scale(shared.logits(ids(20)), llm.logits(ids(20)), 1e-5)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"cache": "sequence"}, "shares slots out over devices, and the mesh has one"),
        ({"cache": "sharded", "mesh": "tensor=8"}, "'sharded', expected one of replicated, seq"),
        ({"cache": "sequence", "mesh": "tensor=6"}, "6 devices: expected a number that divides"),
    ],
)
def test_placements_of_the_cache_that_cannot_be(options, message):
    with pytest.raises(MeshError, match=message):
        check_cache(options["cache"], make_mesh(parse_mesh(options.get("mesh", "tensor=1"))))


def test_every_device_holds_its_part(make_llm):
    weights = make_llm("expert=2,tensor=4").engine.target_weights
    experts = weights["layers"][1]["mlp"]["experts"]["gate_proj"]["packed"][...]
    assert experts.sharding.shard_shape(experts.shape) == (4, 32, 64)
    heads = weights["layers"][0]["self_attn"]["o_proj"][...]
    assert heads.sharding.shard_shape(heads.shape)[0] == 1
    head = weights["lm_head"][...]
    assert head.sharding.shard_shape(head.shape) == (64, 64)


@pytest.mark.slow
def test_two_models_side_by_side(make_llm, llm, ids, on):
    """Of one folder on different devices, their streams interleaved."""
    other = make_llm("tensor=8")
    prompt, params = ids(9, 2), on(40)
    expected = llm.generate([prompt], params)[0].token_ids
    # Rows of the mesh's batch size already compiled.
    several = [r.token_ids for r in other.generate([prompt] * 3, params)]
    assert several == [expected] * 3
    assert llm.generate([prompt], params)[0].token_ids == expected


# Meshes that cannot be.

TINY = preset_config("tiny")


def mesh_of(**sizes) -> Mesh:
    return make_mesh(sizes)


@pytest.mark.parametrize(
    "changes, sizes, problem, working",
    [
        ({"num_attention_heads": 6}, {"tensor": 8}, "num_attention_heads 6 over 8", "tensor=2"),
        ({"n_routed_experts": 12}, {"expert": 8}, "n_routed_experts 12 over 8", "expert=4"),
        ({"vocab_size": 514}, {"tensor": 4}, "vocab_size 514 over 4", "tensor=2"),
        ({"intermediate_size": 100}, {"tensor": 8}, "intermediate_size 100 over 8", "tensor=4"),
        (
            {"moe_intermediate_size": 128},
            {"tensor": 8},
            "moe_intermediate_size 128 over 8 in groups of 32",
            "tensor=4, ",
        ),
        ({"num_attention_heads": 6}, {"expert": 8}, "num_attention_heads 6 over 8", "expert=2"),
    ],
)
def test_sizes_that_do_not_divide_are_named_with_meshes_that_work(changes, sizes, problem, working):
    cfg = dataclasses.replace(TINY, **changes)
    with pytest.raises(MeshError) as error:
        check_sizes(cfg, mesh_of(**sizes))
    assert problem in str(error.value)
    listed = str(error.value).partition("Meshes that work: ")[2].split(", ")
    assert working.strip(", ") in listed
    for text in listed:
        check_sizes(cfg, mesh_of(**parse_mesh(text)))
    assert not {f"{axis}={n}" for axis, n in sizes.items()} & set(listed)


def test_a_mesh_is_refused_before_anything_is_loaded(make_folder, monkeypatch):
    before = num_compiles()
    monkeypatch.setattr("kimi_jax.runtime.llm.load_params", None)
    with pytest.raises(MeshError, match="num_attention_heads 6 over 8.*tensor=2"):
        LLM(make_folder(num_attention_heads=6), mesh="tensor=8", max_length=256)
    assert num_compiles() == before


@pytest.mark.parametrize("sizes", ["tensor=1", "tensor=8", "expert=8", "expert=4,tensor=2"])
def test_meshes_that_fit(sizes):
    mesh = make_mesh(parse_mesh(sizes))
    check_sizes(TINY, mesh)
    assert mesh.axis_names == ("expert", "tensor")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "8",
        "tensor",
        "tensor=",
        "tensor=0",
        "tensor=-2",
        "tensor=2.0",
        "model=8",
        "tensor=2,tensor=4",
        "tensor=2;expert=4",
        "tensor=2,",
    ],
)
def test_mesh_texts_that_say_nothing(folder, text):
    with pytest.raises(MeshError, match="expected e.g. 'tensor=8' or 'expert=4,tensor=2'"):
        LLM(folder, mesh=text, max_length=256)


def test_mesh_texts():
    assert parse_mesh("tensor=8") == {"tensor": 8}
    assert parse_mesh(" expert=4 , tensor=2 ") == {"expert": 4, "tensor": 2}


@pytest.mark.parametrize(
    "options, message",
    [
        ({"mesh": "tensor=16"}, "needs 16 devices, 8 cpu found.*device_count=16"),
        ({"mesh": {"tensor": 4, "expert": 4}}, "needs 16 devices, 8 cpu found"),
        ({"mesh": {"data": 2}}, r"\['data'\] are unknown; there are expert, tensor"),
        ({"mesh": {"tensor": 0}}, "sizes start at 1"),
        ({"platform": "gpu"}, "no gpu device"),
        ({"platform": "tpu"}, "no tpu device"),
        ({"platform": "gpu", "mesh": "tensor=8"}, "no gpu device"),
    ],
)
def test_machines_that_are_not_there(folder, options, message):
    with pytest.raises(MeshError, match=message):
        LLM(folder, max_length=256, **options)


def test_a_jax_mesh_needs_our_axes_and_the_platform_asked_for(folder):
    devices = np.array(jax.devices()).reshape(2, 4)
    with pytest.raises(MeshError, match=r"\('data', 'model'\); expected"):
        LLM(folder, mesh=Mesh(devices, ("data", "model")), max_length=256)
    with pytest.raises(MeshError, match="platform is 'gpu', but the mesh is of cpu devices"):
        LLM(folder, mesh=Mesh(devices, ("tensor", "expert")), platform="gpu", max_length=256)


def test_the_device_in_use_is_logged(folder, caplog):
    with caplog.at_level(logging.INFO, logger="kimi_jax.runtime.llm"):
        LLM(folder, mesh="tensor=4", max_length=256, progress=False)
    assert "4 cpu device(s), float32" in [r.message for r in caplog.records]


def test_no_rules_on_one_device():
    assert meshes.rules_for(make_mesh(None)) == meshes.WHOLE
    assert meshes.rules_for(make_mesh({"tensor": 2})) == meshes.RULES
