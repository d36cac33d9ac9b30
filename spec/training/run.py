"""A training run: steps, their log, evaluations and checkpoints, resumed where it stopped.

The log is JSON lines: a row for every step, and one with `held_out_loss` for every evaluation. A
resumed run drops the rows past the step it goes on from and writes them again.
"""

import dataclasses
import json
import logging
import math
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from spec.training.batches import Placed, Schedule, count_targets, lay_out
from spec.training.checkpoints import Checkpoints
from spec.training.samples import Sample
from spec.training.target import StatesSource
from spec.training.trainer import Example, Trainer, TrainState

_log = logging.getLogger(__name__)


class TrainingError(RuntimeError):
    """A run that cannot go on; what it had learnt before is kept."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Throughput:
    """Tokens and seconds of the steps run now; compiling, in the first, is left out."""

    tokens: int
    target_seconds: float
    drafter_seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Real tokens, padding aside."""
        return self.tokens / max(self.target_seconds + self.drafter_seconds, 1e-9)

    @property
    def drafter_share(self) -> float:
        """Of a step's time, what the drafter's forward, backward and update take."""
        both = self.target_seconds + self.drafter_seconds
        return self.drafter_seconds / both if both else 0.0


def make_example(
    trainer: Trainer,
    source: StatesSource,
    samples: Sequence[Sample],
    rows: Sequence[Sequence[int]],
    *,
    num_rows: int,
    length: int,
) -> tuple[Example, list[Placed]]:
    """A micro-batch on the devices, with the target's states, and where its samples lie."""
    batch, placed = lay_out(samples, rows, num_rows=num_rows, length=length)
    return trainer.place(batch, source.streams(batch, placed)), placed


def train(
    trainer: Trainer,
    schedule: Schedule,
    samples: Sequence[Sample],
    source: StatesSource,
    *,
    checkpoints: Checkpoints,
    log: Path,
    num_steps: int,
    evaluate: Callable[[TrainState], dict[str, Any]] | None = None,
    evaluate_every: int = 0,
    stop_after: int | None = None,
    progress: bool = True,
) -> tuple[TrainState, Throughput]:
    """Trains up to `num_steps` steps, or goes on with a run that was stopped.

    Args:
        trainer: of the drafter.
        schedule: what each step trains on.
        samples: those of the schedule.
        source: of the target's hidden states.
        checkpoints: of this run; the newest complete one is gone on from.
        log: JSON lines.
        num_steps: steps of the whole run.
        evaluate: called with the state every `evaluate_every` steps and at the end; its row is
            logged.
        evaluate_every: 0 is at the end only.
        stop_after: ends the process's part of the run after so many steps, as a kill would, but
            with a checkpoint.
        progress: shows a bar when stderr is a terminal.

    Raises:
        TrainingError: the loss or a gradient is not finite; the last good step is kept.
    """
    restored = checkpoints.restore(trainer.abstract_state())
    if restored is None:
        first, state = 0, trainer.init_state()
    else:
        first, state, _ = restored
        _log.info("going on from step %d", first)
    rows = _keep_rows(log, first)

    def evaluate_at(done: int) -> None:
        is_due = done == num_steps or (evaluate_every and done and done % evaluate_every == 0)
        if evaluate is not None and is_due:
            _write_row(log, {"step": done, **evaluate(state)})

    # Killed between the checkpoint and its evaluation, a run has the one without the other.
    if not any(row["step"] == first and "held_out_loss" in row for row in rows):
        evaluate_at(first)
    last = num_steps if stop_after is None else min(num_steps, first + stop_after)
    told = Throughput(tokens=0, target_seconds=0.0, drafter_seconds=0.0)
    rates = trainer.optimisation.schedule()
    bar = tqdm(
        range(first, last),
        initial=first,
        total=num_steps,
        disable=None if progress else True,
        unit="step",
    )
    for step in bar:
        micro = schedule.step_rows(step)
        indices = [i for rows in micro for row in rows for i in row]
        targets = count_targets(samples, indices)
        spent: list[float] = []

        def examples(micro=micro, spent=spent):
            for rows in micro:
                began = time.perf_counter()
                example, _ = make_example(
                    trainer,
                    source,
                    samples,
                    rows,
                    num_rows=schedule.num_rows,
                    length=schedule.length,
                )
                jax.block_until_ready(example)
                spent.append(time.perf_counter() - began)
                yield example

        began = time.perf_counter()
        state, report = trainer.train_step(state, examples(), targets)
        report = jax.device_get(report)
        target_seconds = sum(spent)
        drafter_seconds = time.perf_counter() - began - target_seconds
        if not report.is_finite:
            checkpoints.save(step, state, {}, force=True)
            checkpoints.wait()
            raise TrainingError(
                f"step {step + 1}: the loss is {float(report.loss)}, the gradient's norm "
                f"{float(report.gradient_norm)}; the weights of step {step} are kept "
                "(--export-only writes them, to go on from with another recipe; whether they are "
                "any good the losses before tell)"
            )
        tokens = sum(len(samples[i].input_ids) for i in indices)
        if step > first:
            told = Throughput(
                tokens=told.tokens + tokens,
                target_seconds=told.target_seconds + target_seconds,
                drafter_seconds=told.drafter_seconds + drafter_seconds,
            )
        row = {
            "step": step + 1,
            "loss": _number(report.loss),
            "gradient_norm": _number(report.gradient_norm),
            "learning_rate": float(np.asarray(rates(step))),
            "accuracy_by_depth": np.round(
                report.sums.correct / np.maximum(report.sums.rows, 1), 4
            ).tolist(),
            "tokens": tokens,
            "target_seconds": round(target_seconds, 3),
            "drafter_seconds": round(drafter_seconds, 3),
        }
        _write_row(log, row)
        bar.set_postfix(loss=row["loss"], accuracy=row["accuracy_by_depth"][0])
        done = step + 1
        checkpoints.save(done, state, {}, force=done == last)
        evaluate_at(done)
    checkpoints.wait()
    return state, told


def read_log(log: Path) -> list[dict[str, Any]]:
    """The rows of a run's log; a last line that a killed run was writing is left out.

    Raises:
        ValueError: another line is no row.
    """
    if not log.exists():
        return []
    whole = log.read_text(encoding="utf-8").split("\n")[:-1]
    return [json.loads(line) for line in whole]


def plot(log: Path, path: Path) -> None:
    """Draws the loss, and where measured the tokens per cycle, against the step."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = read_log(log)
    steps = [row for row in rows if "loss" in row]
    evaluations = [row for row in rows if "held_out_loss" in row]
    cycles = [row for row in evaluations if "tokens_per_cycle" in row]
    figure, axes = pyplot.subplots(2 if cycles else 1, 1, sharex=True, squeeze=False)
    top = axes[0, 0]
    top.plot([r["step"] for r in steps], [r["loss"] for r in steps], lw=0.8, label="training")
    if evaluations:
        x, y = ([r[name] for r in evaluations] for name in ("step", "held_out_loss"))
        top.plot(x, y, "o-", label="held out")
    top.set_ylabel("loss, summed over draft steps")
    top.legend()
    if cycles:
        low = axes[1, 0]
        x, y = ([r[name] for r in cycles] for name in ("step", "tokens_per_cycle"))
        low.plot(x, y, "o-", label="measured")
        y = [r["predicted_tokens_per_cycle"] for r in cycles]
        low.plot(x, y, "x:", label="predicted from the text")
        low.set_ylabel(f"tokens per cycle, K = {cycles[-1]['draft_tokens']}")
        low.legend()
    axes[-1, 0].set_xlabel("step")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _number(x: Any) -> float:
    value = float(x)
    return round(value, 5) if math.isfinite(value) else value


def _write_row(log: Path, row: dict[str, Any]) -> None:
    with log.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def _keep_rows(log: Path, step: int) -> list[dict[str, Any]]:
    """Drops rows past the step, and a half-written last one; what is left."""
    kept = [row for row in read_log(log) if row["step"] <= step]
    if log.exists():
        partial = log.with_name(f"{log.name}.partial")
        partial.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
        os.replace(partial, log)
    return kept
