"""Finds the fastest tiles of every kernel on this GPU and writes them into tiles.json.

    python scripts/tune_tiles.py                          # rewrites the row of the GPU found
    python scripts/tune_tiles.py --dry-run                # prints what would change
    python scripts/tune_tiles.py --fields gate_up down    # these alone

For each kernel's tiles (`FORMS`), at a shape of Kimi-K2.5 on one of 8 devices: starts from those in
the file and tries a small grid, one group of sizes after the other. What does not compile (too much
shared memory) or gives wrong numbers is dropped, the rest is timed as `kernels_pallas/timing.py`
says. The best replaces the old tiles if it is at least 3 % faster, measured again at the end, the
two taking turns. A GPU whose compute capability the file does not list gets a row of its own.

Needs one NVIDIA GPU (compute capability 8.0 or later) and JAX with its CUDA plugin; the status is 2
without, 1 if the tiles of the file cannot run.
About 20 candidates a form, each compiled twice: some 20 minutes in all is a guess, not measured.
Prints a table and the file's change, then one JSON line.
"""

import argparse
import dataclasses
import difflib
import functools
import itertools
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from tqdm import tqdm

from kernels_pallas import tiles, timing
from kernels_pallas.dispatch import Target
from kernels_pallas.registry import OPS
from kernels_pallas.tiles import ChipTiles
from kimi_jax.runtime.conditions import conditions

LEAST_GAIN = 1.03
"""Medians of a few runs differ by about 1 % from one another."""

TURNS = 3
"""Of the old and the new tiles at the end."""

Group = dict[str, tuple[int, ...]]

_MLA: tuple[Group, ...] = (
    {"keys": (16, 32, 64), "num_warps": (4, 8), "num_stages": (1, 2, 3)},
    {"num_splits": (64, 128, 256), "least_chunk": (32, 64, 128)},
)
_EXPERTS: tuple[Group, ...] = (
    {"columns": (16, 32, 64, 128), "inputs": (64, 128, 256)},
    {"num_warps": (2, 4, 8), "num_stages": (2, 3, 4)},
)
_SORTED: tuple[Group, ...] = (
    {"columns": (32, 64, 128), "inputs": (64, 128, 256)},
    {"num_warps": (4, 8), "num_stages": (2, 3, 4)},
)
_LINEAR: tuple[Group, ...] = (
    {"columns": (16, 32, 64, 128), "inputs": (64, 128, 256, 512)},
    {"num_warps": (2, 4, 8), "num_stages": (1, 2, 3, 4)},
)


@dataclasses.dataclass(frozen=True)
class Form:
    """Tiles of one kernel, the shape they are tuned at, and the sizes tried together."""

    field: str
    op: str
    spec: str
    groups: tuple[Group, ...]
    index: int | None = None
    """Of the option, where the field has several."""

    @property
    def name(self) -> str:
        """As in messages."""
        return self.field if self.index is None else f"{self.field}[{self.index}]"

    def of(self, chip: ChipTiles) -> Any:
        """The form's tiles in a chip's row."""
        value = getattr(chip, self.field)
        return value if self.index is None else value[self.index]

    def put(self, chip: ChipTiles, new: Any) -> ChipTiles:
        """The row with other tiles for the form."""
        if self.index is not None:
            options = list(getattr(chip, self.field))
            options[self.index] = new
            new = tuple(options)
        return chip._replace(**{self.field: new})


FORMS = (
    Form("mla_16_bits", "mla_attention", "kimi-step", _MLA, index=0),
    Form("mla_16_bits", "mla_attention", "kimi-verify", _MLA, index=1),
    Form("mla_16_bits", "mla_attention", "kimi-verify-8", _MLA, index=2),
    Form("mla_32_bits", "mla_attention", "kimi-float32", _MLA, index=0),
    Form("gate_up", "expert_ffn", "kimi-verify", _EXPERTS),
    Form("down", "expert_ffn", "kimi-verify", _EXPERTS),
    Form("gate_up_batch", "expert_ffn", "kimi-batch", _EXPERTS),
    Form("down_batch", "expert_ffn", "kimi-batch", _EXPERTS),
    # Its rows are the down kernel's too.
    Form("gate_up_sorted", "expert_ffn", "kimi-prefill", ({"rows": (16, 32, 64)}, *_SORTED)),
    Form("down_sorted", "expert_ffn", "kimi-prefill", _SORTED),
    Form("norm_linear", "norm_linear", "kimi-attention", _LINEAR),
    Form("absorb", "mla_inputs", "kimi-verify", _LINEAR),
)


class Unusable(RuntimeError):
    """Tiles that do not compile or give wrong numbers; the message says which."""


Measure = Callable[[ChipTiles, Form], float]
"""Seconds of a call of the form's op with a chip's tiles; raises `Unusable`."""


class OnGpu:
    """Measures on the device; operands and expected outputs of one shape are kept at a time."""

    def __init__(self, seed: int):
        self._place = functools.lru_cache(maxsize=1)(functools.partial(_place, seed))

    def __call__(self, chip: ChipTiles, form: Form) -> float:
        """Seconds of a call (`Measure`)."""
        op = OPS[form.op]
        with tiles.trying(chip):
            try:
                operands, variants, expected = self._place(form.op, form.spec)
                found = timing.compare(op, form.spec, operands, "triton", expected)
                if not timing.is_right(op, form.spec, found):
                    raise Unusable(f"wrong: error {found.error:.2g}, finite {found.is_finite}")
                return timing.seconds_per_call(
                    lambda *a: op.call(form.spec, a, "triton"), variants
                ).seconds
            except Unusable:
                raise
            # What the compiler refuses comes as many kinds, assertions without a text among them.
            except Exception as error:
                first = (str(error).strip().splitlines() or [type(error).__name__])[0]
                raise Unusable(f"does not compile: {first[:300]}") from None


def _place(seed: int, name: str, spec: str) -> tuple[Any, Any, Any]:
    op = OPS[name]
    operands = jax.tree.map(jnp.array, op.specs[spec].operands(seed))
    variants = timing.timed_variants(op, spec, operands)
    return operands, variants, timing.expected_outputs(op, spec, operands)


def candidates(group: Group, best: Any) -> list[Any]:
    """The best tiles so far with every combination of the group's sizes, itself left out."""
    combinations = itertools.product(*group.values())
    tried = [best._replace(**dict(zip(group, sizes, strict=True))) for sizes in combinations]
    return [new for new in tried if new != best]


def tune_form(chip: ChipTiles, form: Form, measure: Measure) -> tuple[ChipTiles, dict[str, Any]]:
    """The row with the form's fastest tiles, and what was found on the way.

    Raises:
        Unusable: the tiles the row has.
    """
    old = best = form.of(chip)
    times = {old: measure(chip, form)}
    dropped = []
    for group in form.groups:
        for new in candidates(group, best):
            if new in times:
                continue
            try:
                times[new] = measure(form.put(chip, new), form)
            except Unusable as error:
                dropped.append({"tiles": new._asdict(), "reason": str(error)})
        best = min(times, key=lambda tried: times[tried])
    row = {
        "form": form.name,
        "shape": f"{form.op} {form.spec}",
        "old": old._asdict(),
        "best": best._asdict(),
        "tried": len(times) + len(dropped),
        "dropped": dropped,
    }
    gain = 1.0
    if best != old:
        new_chip = form.put(chip, best)
        turns = [(measure(chip, form), measure(new_chip, form)) for _ in range(TURNS)]
        times[old], times[best] = (statistics.median(each) for each in zip(*turns, strict=True))
        gain = times[old] / times[best]
    is_new = gain >= LEAST_GAIN
    row |= {
        "us_old": round(1e6 * times[old], 2),
        "us_best": round(1e6 * times[best], 2),
        "gain": round(gain, 3),
        "changed": is_new,
    }
    return form.put(chip, best) if is_new else chip, row


def tune(
    chip: ChipTiles, forms: Sequence[Form], measure: Measure, budget: float
) -> tuple[ChipTiles, list[dict[str, Any]], list[dict[str, str]]]:
    """The row with all forms tuned, a record of each, and those left out with the reason."""
    began, records, not_run = time.perf_counter(), [], []
    for form in tqdm(forms, "forms", disable=None, leave=False):
        if time.perf_counter() - began >= budget:
            not_run.append({"form": form.name, "reason": f"the {budget:g} s were over"})
            continue
        try:
            chip, record = tune_form(chip, form, measure)
        except Unusable as error:
            # The row's own tiles should run: whatever stops them may have stopped the GPU.
            not_run.append({"form": form.name, "reason": f"its present tiles: {error}"})
            continue
        records.append(record)
    return chip, records, not_run


def changed_lines(old: str, new: str, name: str) -> str:
    """The file's change as a unified diff."""
    lines = (text.splitlines(keepends=True) for text in (old, new))
    return "".join(difflib.unified_diff(*lines, name, name))


def show(records: Sequence[dict[str, Any]]) -> None:
    """The table."""
    print(
        f"{'form':16} {'shape':26} {'tried':>5} {'dropped':>7} {'us old':>9} {'us best':>9}  best"
    )
    for r in records:
        sizes = " ".join(f"{name}={size}" for name, size in r["best"].items())
        print(
            f"{r['form']:16} {r['shape']:26} {r['tried']:5} {len(r['dropped']):7} "
            f"{r['us_old']:9.2f} {r['us_best']:9.2f}  {sizes if r['changed'] else 'as it was'}"
        )


def main() -> None:
    """Tunes, shows, writes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--dry-run", action="store_true", help="print the change, write nothing")
    add("--fields", nargs="+", choices=ChipTiles._fields, default=list(ChipTiles._fields))
    add("--file", type=Path, default=tiles.TILES_FILE, help="default: the package's")
    add("--budget", type=float, default=3600, help="seconds; forms left out are named")
    add("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.budget < 0 or args.seed < 0:
        parser.error("--budget and --seed cannot be negative")
    try:
        before = args.file.read_text(encoding="utf-8")
        chips = tiles.loads(before, str(args.file))
        target = Target.of(timing.find_gpu())
    except timing.NoGpu as error:
        parser.exit(2, f"tune_tiles.py: {error}\n")
    except (OSError, tiles.TilesError) as error:
        parser.exit(1, f"tune_tiles.py: error: {error}\n")
    assert target.capability is not None
    forms = [form for form in FORMS if form.field in args.fields]
    present = tiles.row_of(chips, target)
    chip, records, not_run = tune(present, forms, OnGpu(args.seed), args.budget)
    show(records)
    for form in not_run:
        print(f"not tuned: {form['form']}: {form['reason']}")
    is_changed = chip != present
    after = tiles.dumps(chips | {target.capability: chip}) if is_changed else before
    print(changed_lines(before, after, args.file.name) or "nothing changes")
    is_written = is_changed and not args.dry_run
    if is_written:
        try:
            tiles.write(chips | {target.capability: chip}, args.file)
        except OSError as error:
            parser.exit(1, f"tune_tiles.py: error: {args.file}: {error.strerror}\n")
    out = {
        "chip": "{}.{}".format(*target.capability),
        "changed": is_changed,
        "written": str(args.file) if is_written else None,
        "forms": records,
        "not_run": not_run,
        "conditions": conditions(seed=args.seed),
    }
    print(json.dumps(out))
    parser.exit(1 if any("present tiles" in form["reason"] for form in not_run) else 0)


if __name__ == "__main__":
    main()
