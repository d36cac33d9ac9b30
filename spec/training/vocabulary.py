"""The draft vocabulary: the target's tokens a drafter may propose, the most generated ones.

Published drafters store it as `d2t`, offsets from draft to target ids, and `t2d`, a mask over the
target's ids. A drafter that is trained further keeps its vocabulary; `coverage_of` says how well
that fits new samples.
"""

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np
from jaxtyping import Bool, Int32, Int64

from kimi_jax.text.stream import Marker
from kimi_jax.text.tokenizer import Tokenizer
from spec.training.samples import Sample


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftVocabulary:
    """Target ids in ascending order; a draft id is a place among them.

    `coverage` is the share of the counted tokens that are in it.
    """

    ids: Int32[np.ndarray, "W"]
    target_size: int
    coverage: float

    @property
    def d2t(self) -> Int64[np.ndarray, "W"]:
        """Offsets, as published: target id = draft id + offset."""
        return self.ids.astype(np.int64) - np.arange(len(self.ids))

    @property
    def t2d(self) -> Bool[np.ndarray, "V"]:
        """Which target ids are in it, as published."""
        mask = np.zeros((self.target_size,), np.bool_)
        mask[self.ids] = True
        return mask


def choose_vocabulary(
    counts: Int64[np.ndarray, "V"], size: int, *, required: Sequence[int] = ()
) -> DraftVocabulary:
    """The required ids and the most counted others; of equals the lower id.

    Raises:
        ValueError: a size that does not fit the target's vocabulary or the required ids.
    """
    kept = sorted(set(required))
    outside = [token for token in kept if not 0 <= token < len(counts)]
    if outside:
        raise ValueError(f"required ids {outside} lie outside the vocabulary 0..{len(counts) - 1}")
    if counts.min(initial=0) < 0:
        raise ValueError(f"token {int(counts.argmin())} is counted {int(counts.min())} times")
    if not max(1, len(kept)) <= size <= len(counts):
        raise ValueError(
            f"the draft vocabulary's size is {size}, expected {max(1, len(kept))} (the ids that "
            f"are required) to {len(counts)} (the target's vocabulary)"
        )
    # Stable, so that equals, and those never counted, follow by id.
    order = np.argsort(-counts, kind="stable")
    others = order[~np.isin(order, kept)][: size - len(kept)]
    ids = np.sort(np.concatenate([np.asarray(kept, np.int64), others])).astype(np.int32)
    return DraftVocabulary(ids=ids, target_size=len(counts), coverage=coverage_of(ids, counts))


def coverage_of(ids: Int32[np.ndarray, "W"], counts: Int64[np.ndarray, "V"]) -> float:
    """The share of the counted tokens that are among the ids; 1 if none were counted."""
    total = int(counts.sum())
    return int(counts[np.unique(ids)].sum()) / total if total else 1.0


def count_tokens(samples: Iterable[Sample], vocab_size: int) -> Int64[np.ndarray, "V"]:
    """How often each token was generated."""
    counts = np.zeros((vocab_size,), np.int64)
    for sample in samples:
        generated = sample.input_ids[sample.loss_mask]
        if generated.size and not 0 <= generated.min() <= generated.max() < vocab_size:
            raise ValueError(
                f"sample {sample.id!r} holds ids outside the vocabulary 0..{vocab_size - 1}"
            )
        counts += np.bincount(generated, minlength=vocab_size)
    return counts


def required_ids(tokenizer: Tokenizer, stop_ids: Iterable[int] = ()) -> list[int]:
    """What a drafter must be able to propose however rare: ends, and what structures a reply."""
    names = {marker.value for marker in Marker} & tokenizer.special_tokens.keys()
    special = {tokenizer.special_tokens[name] for name in names}
    return sorted({*tokenizer.eos_ids, *stop_ids} | special)
