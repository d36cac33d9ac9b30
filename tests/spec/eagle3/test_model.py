"""Both drafter kinds, every switch, against the float64 twin of the published mathematics."""

import drafter_oracle as oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kimi_jax.axes import WHOLE
from kimi_jax.model.transformer import Kimi
from kimi_jax.runtime.mesh import make_mesh
from spec import Eagle3Drafter
from spec.eagle3 import model as eagle3

T, PREFILL, CAPACITY = 24, 16, 256
# Logits of order 1 from float32 sums of at most 500 terms; the bar the project sets itself.
TOLERANCE = 2e-4


@pytest.fixture(scope="module")
def target(plain) -> Kimi:
    return plain.model


@pytest.mark.parametrize("kind", ["llama", "mla"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"norm_output": True, "fc_norm": True},
        {"norm_before_fc": True},
        {"norm_before_residual": True},
        {"use_aux_hidden_state": False},
        {"own_embedding": False},
        {"own_head": False, "draft_vocab_size": 512},
    ],
    ids=str,
)
def test_logits_and_carried_states_are_the_twins(
    make_drafter_folder, target, kind, changes, assert_close_to_scale
):
    if kind == "llama" and changes:
        # Groups of four queries a key; without changes every query has its own.
        changes = changes | {"num_key_value_heads": 2}
    folder, cfg = make_drafter_folder(kind, **changes)
    bound = Eagle3Drafter(folder).bind(target.cfg, make_mesh(None), jnp.dtype("float32"))
    model = nnx.merge(bound.graph, bound.weights)
    rng = np.random.default_rng(3)
    taps = [rng.standard_normal((T, target.cfg.hidden_size)).astype(np.float32) for _ in bound.taps]
    tokens = rng.integers(0, target.cfg.vocab_size, T).astype(np.int32)

    config, tensors = oracle.read_drafter(folder)
    lent = {
        "embedding": np.asarray(target.embed_tokens[...].astype(jnp.float32), np.float64),
        "head": np.asarray(target.lm_head[...], np.float64).T,
    }
    given = taps
    if not cfg.use_aux_hidden_state:
        # The drafter is given the target's final state, after its norm.
        x = taps[0].astype(np.float64)
        scale = np.asarray(target.norm[...], np.float64)
        eps = target.cfg.rms_norm_eps
        given = [x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * scale]
    g = oracle.features(tensors, config, given)
    whole = oracle.rows(tensors, config, g, tokens, np.arange(T), **lent)

    @jax.jit
    def run(model, target, cache, taps, tokens):
        feature = eagle3.features(model, cfg, tuple(t[None] for t in taps), target)
        positions = jnp.arange(T, dtype=jnp.int32)[None]
        out, logits = [], []
        for first, last in ((0, PREFILL), (PREFILL, PREFILL + 5), (PREFILL + 5, T)):
            rows, cache = eagle3.forward(
                model,
                cfg,
                feature[:, first:last],
                tokens[None, first:last],
                positions[:, first:last],
                cache,
                target,
                rules=WHOLE,
                is_prefill=first == 0,
            )
            out.append(rows[0])
            logits.append(eagle3.draft_logits(model, cfg, rows[0], target))
        return jnp.concatenate(out), jnp.concatenate(logits)

    cache = eagle3.empty_cache(cfg, 1, CAPACITY, jnp.dtype("float32"))
    carried, logits = run(model, target, cache, taps, tokens)
    assert_close_to_scale(carried, whole.carried, TOLERANCE)
    assert_close_to_scale(logits, whole.logits, TOLERANCE)


@pytest.mark.parametrize("kind", ["llama", "mla"])
def test_a_chain_is_the_twins(make_drafted, make_drafter_folder, ids, on, kind):
    """Greedy drafts after a prompt: the fed-back state, the map, positions and cache slots."""
    llm = make_drafted(kind)
    folder, _ = make_drafter_folder(kind)
    bound, engine = llm.engine.drafter, llm.engine
    prompt = ids(20, 5)
    [request] = llm._requests([prompt], on(8))
    state = engine.prefill(engine.new_state([request]), len(prompt) - 1)

    from spec.draft import draft_chain

    @jax.jit
    def run(weights, state):
        return draft_chain(
            nnx.merge(bound.graph, weights[1]),
            bound.cfg,
            nnx.merge(engine.graph, weights[0]),
            state,
            num_draft_tokens=4,
            is_sampled=False,
            rules=WHOLE,
        )[0].tokens

    drafts = run(engine._weights, state)[0].tolist()

    import oracles

    config, tensors = oracles.read_checkpoint(llm._folder)
    hidden = oracles.forward(tensors, config, prompt).hidden
    own_config, own = oracle.read_drafter(folder)
    n = len(prompt) - 1
    g = oracle.features(own, own_config, [hidden[tap, :n] for tap in bound.taps])
    rows = oracle.rows(own, own_config, g, np.asarray(prompt[1:]), np.arange(n))
    expected, _ = oracle.draft_chain(
        own, own_config, rows.past, rows.carried[-1], rows.logits[-1], n - 1, 4
    )
    assert drafts == list(expected)
