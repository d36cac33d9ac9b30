"""What a device holds during a run, and what would fit where that is too much.

Arithmetic over the sizes of `spec/traffic.py`; nothing is allocated. Counted are weights, caches at
the longest, what a change of the cache holds beside it for a moment, and temporaries as the
compiler reported them for Kimi-K2.5. What lies outside XLA's share of the memory (context, NCCL,
graphs) is not.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

from kimi_jax.config import ModelConfig
from kimi_jax.runtime.engine import capacities_for
from spec.economics import Number
from spec.launches import PREFILL_TEMP_BYTES
from spec.traffic import DrafterBytes, TargetBytes

TEMP_WIDTH = 7168
"""The model width `PREFILL_TEMP_BYTES` was compiled for; temporaries are proportional to it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """Bytes on one device."""

    weights: int
    drafter_weights: int = 0
    slot: Number
    """A slot of a row in the target's cache, or this device's share of it."""
    drafter_slot: Number = 0
    width: int
    """The model's width."""
    slack: int = 0
    """Slots a cycle may write after a row's last token."""

    @classmethod
    def of(
        cls,
        cfg: ModelConfig,
        weights: int,
        target: TargetBytes,
        drafts: DrafterBytes | None = None,
        *,
        slack: int = 0,
    ) -> "Sizes":
        """Of a model with so many bytes of weights, and a drafter or none."""
        return cls(
            weights=weights,
            drafter_weights=0 if drafts is None else drafts.resident,
            slot=target.slot,
            drafter_slot=0 if drafts is None else drafts.slot,
            width=cfg.hidden_size,
            slack=slack,
        )

    def without_drafter(self) -> "Sizes":
        """Of plain decoding; the slack stays, which is few slots and may be the cache's own."""
        return dataclasses.replace(self, drafter_weights=0, drafter_slot=0)


class MemoryShortage(ValueError):
    """A run that does not fit; the message says what would."""


def held(sizes: Sizes, rows: int, capacity: int) -> dict[str, int]:
    """Bytes of weights and caches, so many slots a row."""
    slots = rows * capacity
    return {
        "target_weight_bytes": sizes.weights,
        "drafter_weight_bytes": sizes.drafter_weights,
        "cache_bytes": int(slots * sizes.slot),
        "drafter_cache_bytes": int(slots * sizes.drafter_slot),
    }


def peak(sizes: Sizes, max_length: int, max_batch: int) -> dict[str, int]:
    """Bytes a run holds at most, by part.

    Growing, both caches are there, of the last capacity but one and of the last. Where several rows
    run, a request that takes one is prefilled in a cache of its own first.
    """
    *smaller, capacity = capacities_for(max_length + sizes.slack)
    old = max_batch * smaller[-1] if smaller else 0
    own = capacity if max_batch > 1 else 0
    return {
        **held(sizes, max_batch, capacity),
        "changing_cache_bytes": int(max(old, own) * (sizes.slot + sizes.drafter_slot)),
        "temporary_bytes": max_batch * PREFILL_TEMP_BYTES * sizes.width // TEMP_WIDTH,
    }


def fits(sizes: Sizes, memory: int, max_length: int, max_batch: int) -> bool:
    """Whether such a run fits into so much memory."""
    return sum(peak(sizes, max_length, max_batch).values()) <= memory


def check_memory(
    sizes: Sizes,
    memory: int,
    *,
    max_length: int,
    max_batch: int,
    changes: Mapping[str, Sizes] = MappingProxyType({}),
    more_devices: Iterable[tuple[int, Callable[[], Sizes]]] = (),
) -> dict[str, int]:
    """Bytes by part of a run that fits.

    Args:
        sizes: of this model and drafter on one device.
        memory: what each device has for them.
        max_length: most tokens of a prompt and its reply.
        max_batch: most rows.
        changes: what each device would hold with another option, by the option.
        more_devices: larger numbers of devices the model can be cut over, ascending, and what
            each device would hold then.

    Raises:
        MemoryShortage: what is needed, what is there, and every change that would do.
    """
    parts = peak(sizes, max_length, max_batch)
    total = sum(parts.values())
    if total <= memory:
        return parts
    ways = list(_smaller(sizes, memory, max_length, max_batch))
    for option, changed in changes.items():
        if fits(changed, memory, max_length, max_batch):
            ways.append(option)
        else:
            smaller = _smaller(changed, memory, max_length, max_batch)
            ways += (f"{option} {way}" for way in smaller)
    for devices, sizes_of in more_devices:
        if fits(sizes_of(), memory, max_length, max_batch):
            ways.append(f"{devices} such devices")
            break
    raise MemoryShortage(
        f"too little memory: {total / 1e9:.2f} GB on each device ({describe(parts)}), and each has "
        f"{memory / 1e9:.2f} GB. What would fit: {'; or '.join(ways) or 'nothing on these devices'}"
    )


def describe(parts: Mapping[str, int]) -> str:
    """The parts in words and GB, those that are nothing left out."""
    return ", ".join(
        f"{name.removesuffix('_bytes').replace('_', ' ')} {num_bytes / 1e9:.2f}"
        for name, num_bytes in parts.items()
        if num_bytes
    )


def _smaller(sizes: Sizes, memory: int, max_length: int, max_batch: int) -> Iterable[str]:
    """The longest at this batch, the largest batch at this length, or both smaller."""
    length = _largest(lambda n: fits(sizes, memory, n, max_batch), max_length)
    batch = _largest(lambda n: fits(sizes, memory, max_length, n), max_batch)
    if length >= 2:
        yield f"--max-length {length}"
    if batch:
        yield f"--max-batch {batch}"
    if length < 2 and not batch:
        length = _largest(lambda n: fits(sizes, memory, n, 1), max_length)
        if length >= 2:
            yield f"--max-batch 1 --max-length {length}"


def _largest(is_good: Callable[[int], bool], most: int) -> int:
    """The largest number up to `most` that is good, if all below a good one are; else 0."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if is_good(middle) else (low, middle - 1)
    return low
