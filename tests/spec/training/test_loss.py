"""The unrolled loss against float64 loops over samples, rows and draft steps."""

import drafter_oracle as oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import softmax

from kimi_jax.axes import replace
from spec.training import loss as loss_module
from spec.training import unroll
from spec.training.unroll import shift, valid_rows

SWITCHES = {
    "llama": {},
    "llama, EAGLE-3.1": {"fc_norm": True, "norm_output": True},
    "llama, other norms": {"norm_before_fc": True, "norm_before_residual": True},
    "llama, grouped, own embedding": {"num_key_value_heads": 1, "own_embedding": True},
    "llama, no taps": {"use_aux_hidden_state": False},
    "mla": {"kind": "mla"},
    "mla, borrowed head": {"kind": "mla", "own_head": False},
}


def expected_sums(setup, *, draft_steps, loss):
    """By step: loss, correct, chance to stand, rows; every row as decoding would come to it."""
    config, tensors = oracle.read_drafter(setup.folder)
    ids = oracle.draft_to_target(tensors, config)
    embedding, head = (np.asarray(x, np.float64) for x in setup.ends)
    options = {"embedding": embedding, "head": head.T}
    out = np.zeros((4, draft_steps))
    for sample, (taps, hidden) in zip(setup.samples, setup.states, strict=True):
        tokens, mask = sample.input_ids, sample.loss_mask
        T = len(tokens)
        logits = np.asarray(hidden, np.float64) @ head
        p_all = softmax(logits)
        states = taps if config["eagle_config"]["use_aux_hidden_state"] else [hidden]
        g = oracle.features(tensors, config, states)
        for i in range(T):
            past, carried = None, g
            for s in range(draft_steps):
                if i + 2 + s >= T or not mask[i + 2 : i + 3 + s].all():
                    break
                if s == 0:
                    ran = oracle.rows(
                        tensors, config, g[: i + 1], tokens[1 : i + 2], np.arange(i + 1), **options
                    )
                else:
                    ran = oracle.rows(
                        tensors, config, carried, tokens[[i + 1 + s]], [i + s], past, **options
                    )
                past, carried = ran.past, ran.carried[-1:]
                q, p = softmax(ran.logits[-1]), p_all[i + 1 + s][ids]
                best = int(np.argmax(logits[i + 1 + s]))
                stands = np.minimum(p, q).sum()
                if loss == "acceptance":
                    out[0, s] -= np.log(stands)
                elif best in ids:
                    out[0, s] -= (p / p.sum() * np.log(q)).sum()
                out[1, s] += ids[np.argmax(q)] == best
                out[2, s] += stands
                out[3, s] += 1
    return out


# Each compiles programs of its own: by default one of each loss and each kind of drafter.
ALWAYS = ("mla, borrowed head",)
CASES = [
    ("llama", "acceptance"),
    *(
        pytest.param(name, "cross_entropy", marks=[] if name in ALWAYS else pytest.mark.slow)
        for name in SWITCHES
    ),
]


@pytest.mark.parametrize(("name", "loss"), CASES)
def test_sums_equal_decoding_every_row_in_float64(
    make_setup, make_trainer, place, assert_close, name, loss
):
    setup = make_setup(**SWITCHES[name])
    trainer = make_trainer(setup, loss=loss, draft_steps=3)
    # Packed side by side, padding behind.
    example, count = place(trainer, setup, [[0, 1], []])
    _, sums, _ = trainer.gradients(trainer.init_state(), [example], count)
    expected = expected_sums(setup, draft_steps=3, loss=loss)
    assert expected[3].tolist() == np.asarray(sums.rows).tolist() and expected[3].all()
    assert expected[3, 0] == count
    assert expected[1].tolist() == np.asarray(sums.correct).tolist()
    # Sums of about ten float32 terms of order one.
    assert_close(sums.loss_f32, expected[0], rtol=2e-5, atol=1e-5)
    assert_close(sums.stands_f32, expected[2], rtol=2e-5, atol=1e-5)


def test_total_loss_weighs_steps_and_divides_by_targets(make_setup, make_trainer, place):
    setup = make_setup()
    trainer = make_trainer(setup, decay=0.5)
    example, count = place(trainer, setup, [[0, 1]])
    _, sums, loss = trainer.gradients(trainer.init_state(), [example], count)
    by_hand = sum(0.5**s * float(x) for s, x in enumerate(sums.loss_f32)) / count
    np.testing.assert_allclose(float(loss), by_hand, rtol=1e-6)


def test_valid_rows_by_hand():
    # A prompt token and three generated ones, then a sample of one and two, then padding.
    generated = jnp.asarray([[0, 1, 1, 1, 0, 1, 1, 0]], jnp.bool_)
    first = jnp.asarray([[0, 0, 0, 0, 4, 4, 4, 7]], jnp.int32)
    rows = [np.flatnonzero(np.asarray(x)).tolist() for x in valid_rows(generated, first, 3)]
    # Row i is trained on at step s where tokens i + 2 to i + 2 + s are generated.
    assert rows == [[0, 1, 4], [0], []]


def test_the_last_prompt_token_s_row_drafts_the_reply_s_first():
    generated = jnp.asarray([[0, 0, 0, 1, 1]], jnp.bool_)
    first = jnp.zeros((1, 5), jnp.int32)
    rows = [np.flatnonzero(np.asarray(x)).tolist() for x in valid_rows(generated, first, 2)]
    assert rows == [[1, 2], [1]]


def test_a_reply_to_the_very_end_of_a_row_is_not_drafted_past():
    generated, first = jnp.ones((1, 4), jnp.bool_), jnp.zeros((1, 4), jnp.int32)
    rows = [np.flatnonzero(np.asarray(x)).tolist() for x in valid_rows(generated, first, 2)]
    assert rows == [[0, 1], [0]]


def test_shift_brings_zeros_in():
    x = jnp.arange(1, 5, dtype=jnp.int32)[None]
    assert shift(x, 0).tolist() == [[1, 2, 3, 4]]
    assert shift(x, 3).tolist() == [[4, 0, 0, 0]]
    assert shift(x, 9).tolist() == [[0, 0, 0, 0]]


@pytest.mark.parametrize("kind", ["llama", pytest.param("mla", marks=pytest.mark.slow)])
def test_blocks_of_places_change_nothing(
    make_setup, make_trainer, place, gradients_of, assert_close, monkeypatch, kind
):
    setup = make_setup(kind)
    whole = make_trainer(setup)
    expected = gradients_of(whole, *place(whole, setup, [[0, 1]]))
    monkeypatch.setattr(unroll, "ROW_BLOCK", 4)
    monkeypatch.setattr(loss_module, "ROW_BLOCK", 4)
    cut = make_trainer(setup)
    loss, gradients, _ = gradients_of(cut, *place(cut, setup, [[0, 1]]))
    np.testing.assert_allclose(loss, expected[0], rtol=1e-6)
    for path, value in expected[1].items():
        assert_close(gradients[path], value, atol=1e-6)


def test_gradients_equal_finite_differences(make_setup, make_trainer, place, gradients_of):
    setup = make_setup()
    trainer = make_trainer(setup)
    example, count = place(trainer, setup, [[0, 1]])
    _, gradients, _ = gradients_of(trainer, example, count)
    state = trainer.init_state()
    leaves, structure = jax.tree.flatten(state.weights)
    rng = np.random.default_rng(0)
    directions = [rng.standard_normal(x.shape).astype(np.float32) for x in leaves]
    slope = sum(float(np.vdot(d, g)) for d, g in zip(directions, gradients.values(), strict=True))

    def loss_at(step):
        moved = [x + step * d for x, d in zip(leaves, directions, strict=True)]
        weights = jax.tree.unflatten(structure, moved)
        return float(trainer.gradients(replace(state, weights=weights), [example], count)[2])

    measured = (loss_at(1e-3) - loss_at(-1e-3)) / 2e-3
    # The loss is about ten, to 1e-6 of that; over a step of 2e-3 this leaves half a percent.
    np.testing.assert_allclose(measured, slope, rtol=2e-2)
