"""Both drafter kinds, every switch, against the float64 twin of the published mathematics."""

import functools

import drafter_oracle as oracle
import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from flax import nnx
from scripted import TREES

from kimi_jax.axes import WHOLE
from kimi_jax.model.transformer import Kimi
from kimi_jax.runtime.mesh import make_mesh
from spec import load_drafter
from spec.draft import propose
from spec.eagle3 import model as eagle3
from spec.tree import Chain

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
        pytest.param({"norm_before_fc": True}, marks=pytest.mark.slow),
        pytest.param({"norm_before_residual": True}, marks=pytest.mark.slow),
        {"use_aux_hidden_state": False},
        pytest.param({"own_embedding": False}, marks=pytest.mark.slow),
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
    bound = load_drafter(folder).bind(target.cfg, make_mesh(None), jnp.dtype("float32"))
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


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "mla"])
def test_drafts_are_the_twins(make_drafted, make_drafter_folder, target_folder, ids, on, kind):
    """Chain and trees after a prompt: the fed-back state, map, positions, slots and tree masks."""
    llm = make_drafted(kind)
    folder, _ = make_drafter_folder(kind)
    bound, engine = llm.engine.drafter, llm.engine
    prompt = ids(20, 5)
    [request] = llm._requests([prompt], on(8))
    state = engine.prefill(engine.new_state([request]), len(prompt) - 1)

    @functools.partial(jax.jit, static_argnames="shape")
    def run(target, own, state, shape):
        model, target = nnx.merge(bound.graph, own), nnx.merge(engine.graph, target)
        return propose(model, bound.cfg, target, state, shape, is_sampled=False, rules=WHOLE)[0]

    def drafts_of(shape):
        return run(engine.target_weights, bound.weights, state, shape)

    config, tensors = oracles.read_checkpoint(target_folder)
    hidden = oracles.forward(tensors, config, prompt).hidden
    own_config, own = oracle.read_drafter(folder)
    n = len(prompt) - 1
    g = oracle.features(own, own_config, [hidden[tap, :n] for tap in bound.taps])
    rows = oracle.rows(own, own_config, g, np.asarray(prompt[1:]), np.arange(n))

    def guess(path: tuple[int, ...], k: int) -> list[tuple[int, float]]:
        """The twin's k likeliest tokens after drafts already taken, and their log-probabilities."""
        past, carried, logits = rows.past, rows.carried[-1], rows.logits[-1]
        for place, token in enumerate(path):
            step = oracle.rows(own, own_config, carried[None], [token], [n + place], past)
            past, carried, logits = step.past, step.carried[0], step.logits[0]
        logprobs = logits - np.logaddexp.reduce(logits)
        best = np.argsort(-logits, kind="stable")[:k]
        return [(int(to_target[i]), float(logprobs[i])) for i in best]

    to_target = oracle.draft_to_target(own, own_config)
    chain: tuple[int, ...] = ()
    for _ in range(4):
        chain += (guess(chain, 1)[0][0],)
    assert drafts_of(Chain(4)).tokens[0].tolist() == list(chain)

    static, dynamic, _ = TREES
    found = drafts_of(static)
    words: dict[tuple[int, ...], tuple[int, ...]] = {(): ()}
    for path in static.paths:
        above = words[path[:-1]]
        words[path] = (*above, guess(above, path[-1] + 1)[path[-1]][0])
    assert found.tokens[0].tolist() == [words[path][-1] for path in static.paths]
    assert found.parents[0].tolist() == static.parents.tolist()

    # EAGLE-2 by the book: extend the best k of each depth by their best k, propose the best of all.
    k, level, everything = dynamic.top_k, {(): 0.0}, {}
    for _ in range(dynamic.depth):
        grown = {
            (*words, token): score + logprob
            for words, score in level.items()
            for token, logprob in guess(words, k)
        }
        everything |= grown
        level = dict(sorted(grown.items(), key=lambda item: -item[1])[:k])
    ranked = sorted(everything.items(), key=lambda item: -item[1])
    best = {words for words, _ in ranked[: dynamic.num_draft_tokens]}
    found = drafts_of(dynamic)
    nodes: list[tuple[int, ...]] = [()]
    for token, parent in zip(found.tokens[0].tolist(), found.parents[0].tolist(), strict=True):
        nodes.append((*nodes[parent], token))
    assert set(nodes[1:]) == best
