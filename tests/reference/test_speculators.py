"""Llama-style drafters against `speculators`, the library that trains and publishes them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from make_random_checkpoint import make_random_checkpoint
from make_random_drafter import tiny_drafter_config, write_random_drafter
from safetensors.numpy import load_file

from kimi_jax import DEMO, LLM
from kimi_jax.axes import WHOLE
from kimi_jax.config import ModelConfig
from kimi_jax.model.transformer import Kimi
from kimi_jax.runtime.mesh import make_mesh
from spec import DEMO_DRAFTER, load_drafter
from spec.eagle3 import model as eagle3
from spec.training.drafters import Beginning, export_drafter
from spec.training.target import ends_of

pytestmark = [
    pytest.mark.reference,
    # speculators calls transformers by names that newer releases deprecate.
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

T = 24
# Logits of order 1 from float32 sums of at most 500 terms; the bar the project sets itself.
TOLERANCE = 2e-4


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_key_value_heads": 2},
        {"norm_output": True, "fc_norm": True},
        {"norm_before_fc": True},
        {"norm_before_residual": True},
    ],
    ids=str,
)
def test_logits_of_a_pass_and_of_a_draft_step(tmp_path, changes, assert_close_to_scale):
    """A published file in both: over a text, and from what its last row carries."""
    make_random_checkpoint(tmp_path / "target", "tiny", num_hidden_layers=2)
    target_cfg = ModelConfig.from_folder(tmp_path / "target")
    cfg = tiny_drafter_config(
        "llama", target_cfg, **{"num_attention_heads": 8, "num_key_value_heads": 8} | changes
    )
    write_random_drafter(tmp_path / "drafter", cfg)
    compare(tmp_path / "drafter", cfg, target_cfg, assert_close_to_scale)


def test_the_demo_s_trained_drafter_as_exported_for_other_engines(tmp_path, assert_close_to_scale):
    """With the names of vLLM and speculators, and a copy of the target's embedding."""
    llm = LLM(DEMO, max_length=64, max_batch=1, progress=False)
    ends, norm = ends_of(llm)
    start = Beginning.warm(DEMO_DRAFTER, llm.cfg)
    model = start.model(start.draft_ids(), ends, norm, make_mesh(None), seed=0)
    export_drafter(
        tmp_path / "drafter",
        start.cfg,
        nnx.split(model)[1],
        layer_prefix="layers.0.",
        embedding=ends.embed_tokens,
    )
    compare(tmp_path / "drafter", start.cfg, llm.cfg, assert_close_to_scale)


def compare(folder, cfg, target_cfg, assert_close_to_scale):
    """Logits of a pass over random states, and of a draft step after it."""
    torch = pytest.importorskip("torch")
    speculators = pytest.importorskip(
        "speculators.models.eagle3", reason="speculators is not installed (see .ci/run)"
    )
    transformers = pytest.importorskip("transformers")
    tensors = load_file(folder / "model.safetensors")
    rng = np.random.default_rng(5)
    D, V = cfg.hidden_size, cfg.vocab_size
    taps = rng.standard_normal((len(cfg.taps), T, D)).astype(np.float32)
    tokens = rng.integers(0, V, T).astype(np.int32)

    layer = transformers.LlamaConfig(
        vocab_size=V,
        hidden_size=D,
        intermediate_size=cfg.intermediate_size,
        num_hidden_layers=1,
        num_attention_heads=cfg.num_attention_heads,
        num_key_value_heads=cfg.num_key_value_heads,
        head_dim=cfg.head_dim,
        rms_norm_eps=cfg.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": cfg.rope.theta},
        max_position_embeddings=cfg.max_position_embeddings,
        attn_implementation="eager",
    )
    theirs = speculators.Eagle3DraftModel(
        speculators.Eagle3SpeculatorConfig(
            transformer_layer_config=layer,
            draft_vocab_size=cfg.draft_vocab_size,
            eagle_aux_hidden_state_layer_ids=list(cfg.taps),
            norm_before_residual=cfg.norm_before_residual,
            norm_before_fc=cfg.norm_before_fc,
            fc_norm=cfg.fc_norm,
            norm_output=cfg.norm_output,
        )
    )
    named = {
        name.replace("midlayer.", "layers.0."): _tensor(torch, value)
        for name, value in tensors.items()
    }
    missing, unexpected = theirs.load_state_dict(named, strict=False)
    assert not unexpected and all(name.startswith("verifier_") for name in missing)
    seen = []
    theirs.lm_head.register_forward_hook(lambda module, given, out: seen.append(out[0]))
    with torch.no_grad():
        theirs.float().eval()(
            hidden_states=torch.from_numpy(np.concatenate(list(taps), axis=-1))[None],
            input_ids=torch.from_numpy(tokens.astype(np.int64))[None],
            document_ids=torch.zeros((1, T), dtype=torch.long),
            ttt_steps=2,
        )
    first, second = (x.numpy() for x in seen)

    bound = load_drafter(folder).bind(target_cfg, make_mesh(None), jnp.dtype("float32"))
    model = nnx.merge(bound.graph, bound.weights)
    target = Kimi(target_cfg, dtype=jnp.dtype("float32"), rngs=nnx.Rngs(0))

    def run(feature, tokens, start, cache):
        positions = start + jnp.arange(tokens.shape[0], dtype=jnp.int32)[None]
        rows, cache = eagle3.forward(
            model, cfg, feature, tokens[None], positions, cache, target, rules=WHOLE
        )
        return rows, eagle3.draft_logits(model, cfg, rows[0], target), cache

    feature = eagle3.features(model, cfg, tuple(jnp.asarray(tap)[None] for tap in taps), target)
    cache = eagle3.empty_cache(cfg, 1, 256, jnp.dtype("float32"))
    rows, ours, cache = jax.jit(run)(feature, jnp.asarray(tokens), jnp.int32(0), cache)
    assert_close_to_scale(ours, first, TOLERANCE)
    # Their second step feeds what each row carried with the token after next, 0 past the end.
    padding = jnp.zeros((1,), jnp.int32)
    _, drafted, _ = jax.jit(run)(rows[:, -1:], padding, jnp.int32(T), cache)
    assert_close_to_scale(drafted[0], second[-1], TOLERANCE)


def _tensor(torch, value):
    value = np.array(value)
    return torch.from_numpy(value.astype(np.float32) if value.dtype == jnp.bfloat16 else value)
