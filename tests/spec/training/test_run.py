"""A run that was stopped goes on as if it had not been, on other devices too."""

import json

import jax
import numpy as np
import pytest

from kimi_jax.axes import replace
from spec.training.batches import Schedule
from spec.training.checkpoints import Checkpoints, ResumeError
from spec.training.loss import Streams
from spec.training.run import TrainingError, plot, read_log, train

STEPS = 6


class Source:
    """The states of a setup's samples, put where they lie; at one step there is something odd."""

    def __init__(self, setup, *, bad_call=None):
        self.setup, self.bad_call, self.calls = setup, bad_call, 0

    def streams(self, batch, placed):
        width = self.setup.states[0][1].shape[1]
        shape = (*batch.tokens.shape, width)
        taps = [np.zeros(shape, np.float32) for _ in self.setup.cfg.taps]
        hidden = np.zeros(shape, np.float32)
        for place in placed:
            own_taps, own_hidden = self.setup.states[place.sample]
            at = slice(place.start, place.start + len(own_hidden))
            hidden[place.row, at] = own_hidden
            for tap, own in zip(taps, own_taps, strict=True):
                tap[place.row, at] = own
        if self.calls == self.bad_call:
            hidden[:] = np.nan
        self.calls += 1
        return Streams(taps=tuple(taps), hidden=hidden)


@pytest.fixture(scope="module")
def setup(make_setup):
    return make_setup(lengths=tuple(range(6, 14)) * 2)


@pytest.fixture
def run(setup, make_trainer, tmp_path):
    def run(name, *, devices=1, source=None, fingerprint=None, **options):
        trainer = make_trainer(setup, devices=devices, steps=STEPS)
        schedule = Schedule(setup.samples, num_rows=8, length=16, seed=3, accumulate=1)
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        with Checkpoints(folder / "steps", fingerprint=fingerprint or {"a": 1}, every=2) as kept:
            return train(
                trainer,
                schedule,
                setup.samples,
                source or Source(setup),
                checkpoints=kept,
                log=folder / "log.jsonl",
                num_steps=STEPS,
                progress=False,
                **options,
            )

    return run


def losses(tmp_path, name):
    return [row["loss"] for row in read_log(tmp_path / name / "log.jsonl") if "loss" in row]


def test_stopped_and_resumed_equals_unbroken(run, tmp_path):
    whole, _ = run("whole")
    run("parts", stop_after=3)
    # What a kill leaves: a step folder with nothing in it, rows past the step, half a row.
    (tmp_path / "parts" / "steps" / "4").mkdir()
    with (tmp_path / "parts" / "log.jsonl").open("a") as file:
        file.write(json.dumps({"step": 4, "loss": 0.5}) + '\n{"step": 5, "lo')
    parts, _ = run("parts")
    assert int(parts.step) == STEPS
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(parts), strict=True):
        np.testing.assert_array_equal(a, b)
    assert losses(tmp_path, "parts") == losses(tmp_path, "whole")
    rates = [
        [row["learning_rate"] for row in read_log(tmp_path / name / "log.jsonl")]
        for name in ("whole", "parts")
    ]
    assert rates[0] == rates[1] and len(set(rates[0])) == STEPS


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(1, 8), (8, 1)])
def test_resumed_on_other_devices(run, tmp_path, before, after):
    run("one")
    run("other", devices=before, stop_after=3)
    run("other", devices=after)
    np.testing.assert_allclose(losses(tmp_path, "other"), losses(tmp_path, "one"), rtol=1e-5)


@pytest.mark.slow
def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_last_good_step(run, setup, tmp_path):
    good, _ = run("good", stop_after=3)
    with pytest.raises(
        TrainingError, match=r"step 4: the loss is nan.* weights of step 3 are kept"
    ):
        run("bad", source=Source(setup, bad_call=3))
    # Going on without what was odd repeats the run that never met it.
    run("good")
    run("bad")
    assert losses(tmp_path, "bad") == losses(tmp_path, "good")


def test_another_recipe_is_refused(run):
    run("a", stop_after=1)
    with pytest.raises(ResumeError, match="a: 1, 2"):
        run("a", fingerprint={"a": 2})


def test_evaluations_are_logged_and_drawn(run, tmp_path):
    def evaluate(state):
        step = int(replace(state).step)
        return {
            "draft_tokens": 2,
            "held_out_loss": 1.0 / step,
            "tokens_per_cycle": 1.5,
            "predicted_tokens_per_cycle": 1.5,
        }

    run("a", evaluate=evaluate, evaluate_every=4)
    rows = [row for row in read_log(tmp_path / "a" / "log.jsonl") if "held_out_loss" in row]
    assert [row["step"] for row in rows] == [4, 6]
    plot(tmp_path / "a" / "log.jsonl", tmp_path / "log.png")
    assert (tmp_path / "log.png").read_bytes().startswith(b"\x89PNG")
