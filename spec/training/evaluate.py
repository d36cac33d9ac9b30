"""How good a drafter is: on the text itself, and in the cycles it is for.

On a text the target wrote greedily, the drafts of every place are known without running a cycle:
`walk` follows the cycles from place to place and so predicts what decoding will count. Where the
two disagree, training and serving do not see the same rows.
"""

import dataclasses
from collections.abc import Iterable, Sequence

import jax
import numpy as np
from flax import nnx

from kimi_jax.runtime.decode import Weights
from kimi_jax.runtime.llm import LLM
from kimi_jax.runtime.replies import Speculation
from kimi_jax.runtime.sampling import SamplingParams
from spec.training.batches import Placed
from spec.training.loss import Sums
from spec.training.samples import Sample
from spec.training.trainer import Example, Trainer, TrainState


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeldOut:
    """Of held-out samples: the loss, and by step of the unrolling how good the drafts are.

    `accuracy_by_depth` is the share of rows whose draft is the target's most likely token, given
    the true tokens before it; `acceptance_by_depth` the chance that a draft drawn from the drafter
    is accepted at temperature 1. `walks` counts, for each sample, the cycles that greedy decoding
    of this very text would take, if the target wrote it greedily.
    """

    loss: float
    accuracy_by_depth: tuple[float, ...]
    acceptance_by_depth: tuple[float, ...]
    walks: tuple[Speculation, ...]


def walk(match: np.ndarray, starts: tuple[int, int], num_draft_tokens: int) -> Speculation:
    """The cycles over one sample: the drafts that stand at each place, and where the next begins.

    Args:
        match: bool [S, T], whether the draft of each step is the sample's token; S at least the
            number of draft tokens.
        starts: the first and the last row a cycle can begin at: those that draft the reply's
            first token and its last.
        num_draft_tokens: K.
    """
    K = num_draft_tokens
    row, last = starts
    cycles, emitted, by_depth = 0, 0, [0] * K
    while row <= last:
        count = 0
        # The last tokens of the reply can be drafted, not what would come after them.
        while count < min(K, last - row + 1) and match[count, row]:
            by_depth[count] += 1
            count += 1
        given = min(count + 1, last - row + 1)
        cycles, emitted, row = cycles + 1, emitted + given, row + count + 1
    return Speculation(
        cycles=cycles, drafted=cycles * K, accepted_by_depth=tuple(by_depth), emitted=emitted
    )


def held_out(
    trainer: Trainer,
    state: TrainState,
    samples: Sequence[Sample],
    examples: Iterable[tuple[Example, Sequence[Placed]]],
    *,
    num_draft_tokens: int,
) -> HeldOut:
    """Evaluates the drafter on held-out samples, a batch at a time."""
    sums: Sums | None = None
    targets = 0
    walks: dict[int, Speculation] = {}
    steps = trainer.unrolling.draft_steps
    for example, placed in examples:
        part, match, counts = jax.device_get(trainer.evaluate(state, example))
        sums = part if sums is None else jax.tree.map(np.add, sums, part)
        targets += int(np.sum(counts[0]))
        for place in placed:
            sample = samples[place.sample]
            end = place.start + len(sample.input_ids)
            own = match[:, place.row, place.start : end]
            generated = np.flatnonzero(sample.loss_mask)
            # The rows whose draft is the first token of the reply, and the last. Where the prompt
            # is one token no row drafts the first.
            first, last = max(0, int(generated[0]) - 2), int(generated[-1]) - 2
            if num_draft_tokens <= steps:
                walks[place.sample] = walk(own, (first, last), num_draft_tokens)
    assert sums is not None  # there are samples
    rows = np.maximum(sums.rows, 1)
    weights = trainer.unrolling.decay ** np.arange(steps)
    return HeldOut(
        loss=float(np.sum(weights * sums.loss_f32) / max(targets, 1)),
        accuracy_by_depth=tuple((sums.correct / rows).tolist()),
        acceptance_by_depth=tuple((sums.stands_f32 / rows).tolist()),
        walks=tuple(walks[i] for i in sorted(walks)),
    )


def serve(llm: LLM, weights: Weights) -> None:
    """Makes an LLM that has a drafter of this kind draft with these weights."""
    bound = llm.engine.drafter
    assert bound is not None
    new = {path: param[...] for path, param in nnx.to_flat_state(weights)}
    flat = []
    for path, param in nnx.to_flat_state(bound.weights):
        old = param[...]
        flat.append(
            (path, param.replace(jax.device_put(new[path].astype(old.dtype), old.sharding)))
        )
    llm.engine.replace_drafter_weights(nnx.from_flat_state(flat))


def decode_held_out(
    llm: LLM, prompts: Sequence[Sequence[int]], limits: Sequence[int]
) -> Speculation:
    """Counts of real cycles over greedy replies to these prompts, each up to its limit."""
    params = [SamplingParams(max_new_tokens=limit) for limit in limits]
    results = llm.generate([list(prompt) for prompt in prompts], params)
    return Speculation.total(r.speculation for r in results if r.speculation is not None)


def summary(held: HeldOut, num_decoded: int) -> dict[str, object]:
    """For a log: rounded, by name; cycles are predicted for the first `num_decoded` samples."""
    walked = Speculation.total(held.walks[:num_decoded])
    return {
        "held_out_loss": round(held.loss, 4),
        "accuracy_by_depth": [round(x, 4) for x in held.accuracy_by_depth],
        "acceptance_by_depth": [round(x, 4) for x in held.acceptance_by_depth],
        "predicted_tokens_per_cycle": round(walked.tokens_per_cycle, 4),
        "predicted_accepted_by_depth": shares(walked),
    }


def shares(told: Speculation) -> list[float]:
    """Of all cycles, the share that accepted so many drafts or more."""
    return [round(n / max(told.cycles, 1), 4) for n in told.accepted_by_depth]
