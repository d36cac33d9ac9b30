"""One optimiser step: what changes nothing (padding, packing, devices), and what learns."""

import jax
import jax.numpy as jnp
import numpy as np
import pieces
import pytest
from flax import nnx

from kimi_jax.axes import replace
from spec.training.trainer import Example

# Float32 sums in another order; gradients are of order one.
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


@pytest.fixture(scope="module")
def setup(make_setup):
    return make_setup(lengths=(9, 6, 7, 5))


@pytest.fixture(scope="module")
def expected(setup, make_trainer, place, gradients_of):
    """A row for each sample."""
    with pieces.quick_compiles():
        trainer = make_trainer(setup)
        example, count = place(trainer, setup, [[0], [1], [2], [3]])
        return gradients_of(trainer, example, count)


def check_same(found, expected, assert_close):
    np.testing.assert_allclose(found[0], expected[0], **CLOSE)
    assert found[1].keys() == expected[1].keys()
    for path, value in expected[1].items():
        assert_close(found[1][path], value, **CLOSE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "num_rows", "length"),
    [([[0], [1], [2], [3]], 4, 24), ([[0, 1], [2, 3]], 2, 16), ([[3, 1, 2], [0]], 6, 20)],
    ids=["padded", "packed", "packed, padded and reordered"],
)
def test_padding_and_packing_change_nothing(
    setup, expected, make_trainer, place, gradients_of, assert_close, rows, num_rows, length
):
    trainer = make_trainer(setup)
    example, count = place(trainer, setup, rows, num_rows=num_rows, length=length)
    check_same(gradients_of(trainer, example, count), expected, assert_close)


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["replicated", "sharded"])
def test_eight_devices_equal_one(
    setup, expected, make_trainer, place, gradients_of, assert_close, placement
):
    trainer = make_trainer(setup, devices=8, placement=placement)
    example, count = place(trainer, setup, [[0], [1], [2], [3]], num_rows=8)
    assert len(example.batch.tokens.sharding.device_set) == 8
    check_same(gradients_of(trainer, example, count), expected, assert_close)
    state = trainer.init_state()
    cut = [x for x in jax.tree.leaves(state) if not x.sharding.is_fully_replicated]
    assert bool(cut) == (placement == "sharded")
    state, report = trainer.train_step(state, [example], count)
    one = make_trainer(setup)
    alone, _ = one.train_step(one.init_state(), [place(one, setup, [[0], [1], [2], [3]])[0]], count)
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(alone), strict=True):
        # Adam divides by the gradient's size: where that is nothing but rounding, signs differ.
        assert_close(a, b, atol=2e-3)


def test_micro_batches_equal_one_batch(setup, expected, make_trainer, place, assert_close):
    trainer = make_trainer(setup)
    examples = [place(trainer, setup, rows)[0] for rows in ([[0], [1]], [[2], [3]])]
    count = place(trainer, setup, [[0], [1], [2], [3]])[1]
    gradients, _, loss = trainer.gradients(trainer.init_state(), examples, count)
    flat = jax.tree_util.tree_leaves_with_path(gradients)
    found = {jax.tree_util.keystr(path): x for path, x in flat}
    check_same((float(loss), found), expected, assert_close)


@pytest.mark.slow
def test_activations_kept_or_computed_again_are_the_same(
    setup, expected, make_trainer, place, gradients_of, assert_close
):
    trainer = make_trainer(setup, remat=False)
    example, count = place(trainer, setup, [[0], [1], [2], [3]])
    check_same(gradients_of(trainer, example, count), expected, assert_close)


@pytest.mark.parametrize("kind", ["llama", pytest.param("mla", marks=pytest.mark.slow)])
def test_one_batch_is_learnt_by_heart_and_nothing_else_moves(make_setup, make_trainer, place, kind):
    setup = make_setup(kind, own_embedding=True, lengths=(9, 6))
    trainer = make_trainer(setup, steps=60, learning_rate=3e-2)
    example, count = place(trainer, setup, [[0, 1]])
    state = trainer.init_state()
    before = {path: np.asarray(x[...]) for path, x in flat(trainer.weights(state))}
    reports = []
    for _ in range(60):
        state, report = trainer.train_step(state, [example], count)
        reports.append(jax.device_get(report))
    # Cross-entropy with soft labels ends at their entropy, not at zero; the drafts are right.
    assert reports[-1].loss < 0.75 * reports[0].loss
    judged = reports[-1].sums
    # Of the tokens it knows: two in seven are not in the draft vocabulary.
    assert judged.correct[0] >= 0.7 * judged.rows[0] > reports[0].sums.correct[0]
    after = {path: np.asarray(x[...]) for path, x in flat(trainer.weights(state))}
    still = {path[0] for path, x in after.items() if np.array_equal(x, before[path])}
    wanted = {"embed_tokens"} | ({"draft_to_target"} if kind == "llama" else set())
    assert still == wanted


def test_padding_is_never_looked_at_and_every_weight_gets_a_gradient(setup, make_trainer, place):
    trainer = make_trainer(setup)
    example, count = place(trainer, setup, [[0, 1]])
    state = trainer.init_state()

    def odd(x):
        # The samples fill 15 places of 16.
        return jnp.asarray(x).at[:, 15:].set(1e3)

    changed = Example(example.batch, jax.tree.map(odd, example.streams))
    first = trainer.gradients(state, [example], count)
    second = trainer.gradients(state, [changed], count)
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        np.testing.assert_array_equal(a, b)
    assert all(np.abs(np.asarray(x)).max() > 0 for x in jax.tree.leaves(first[0]))


@pytest.mark.slow
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_loss_that_is_not_finite_changes_nothing(setup, make_trainer, place, bad):
    trainer = make_trainer(setup)
    example, count = place(trainer, setup, [[0, 1]])
    state, _ = trainer.train_step(trainer.init_state(), [example], count)
    kept = [np.asarray(x) for x in jax.tree.leaves(state)]
    hidden = np.asarray(example.streams.hidden).copy()
    hidden[0, 3, 0] = bad
    broken = Example(example.batch, replace(example.streams, hidden=jnp.asarray(hidden)))
    state, report = trainer.train_step(state, [broken], count)
    assert not report.is_finite
    for a, b in zip(jax.tree.leaves(state), kept, strict=True):
        np.testing.assert_array_equal(a, b)


def test_rows_that_do_not_divide_are_refused(setup, make_trainer, place):
    trainer = make_trainer(setup, devices=8)
    with pytest.raises(ValueError, match="3 rows a batch do not divide over 8 devices"):
        place(trainer, setup, [[0], [1], [2]])


def test_the_learning_rate_rises_and_falls(setup, make_trainer):
    rates = make_trainer(setup, steps=100, learning_rate=0.5).optimisation.schedule()
    found = [float(rates(step)) for step in (0, 1, 2, 50, 99)]
    # Two steps of warm-up, then half a cosine: 0.5 at its start, half of it half way.
    np.testing.assert_allclose(found[2], 0.5, rtol=1e-6)
    np.testing.assert_allclose(found[3], 0.25, rtol=0.05)
    assert 0 < found[0] < found[1] < found[2] > found[3] > found[4] >= 0 and found[4] < 1e-3


def flat(weights):
    return nnx.to_flat_state(weights)


def test_a_borrowed_head_is_not_trained(make_setup, make_trainer):
    setup = make_setup("mla", own_head=False)
    trainer = make_trainer(setup)
    paths = {path[0] for path, _ in flat(trainer.init_state().weights)}
    assert "lm_head" not in paths and "embed_tokens" not in paths
