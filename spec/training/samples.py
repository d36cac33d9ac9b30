"""Training samples: token ids exactly as served, and which of them the target generated.

A samples file is JSON lines. The first says what the samples were made with; every other is one:
`{"id": ..., "input_ids": [...], "generated": [[start, stop], ...]}` and whatever else helps a
human, which is not read. Nothing that is wrong with a row is passed over: a `Report` counts it. It
knows token ids only; `spec.training.conversations` makes them of text.
"""

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Int32

from kimi_jax.runtime.jsonl import ResumableLines

FORMAT = "kimi_jax training samples"
VERSION = 1
MAX_EXAMPLES = 3
"""Rows a report names for each reason."""

NOT_COMPARED = ("conditions", "limit")
"""What a resumed run may change of `Header.made_with`: neither changes a sample."""


class SamplesError(ValueError):
    """A samples file that cannot be read or added to; names the file and what is wrong."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample:
    """One sequence; `loss_mask` marks the tokens the target generates, never the template's."""

    id: str
    input_ids: Int32[np.ndarray, "T"]
    loss_mask: Bool[np.ndarray, "T"]

    @classmethod
    def of(cls, id: str, ids: Iterable[int], generated: Iterable[Sequence[int]]) -> "Sample":
        """From the spans [start, stop) that were generated."""
        input_ids = np.asarray(list(ids), np.int32)
        loss_mask = np.zeros(input_ids.shape, np.bool_)
        for start, stop in generated:
            loss_mask[start:stop] = True
        return cls(id=id, input_ids=input_ids, loss_mask=loss_mask)

    @property
    def generated(self) -> list[tuple[int, int]]:
        """The spans [start, stop) of the mask, in order and apart."""
        edges = np.flatnonzero(np.diff(np.concatenate([[False], self.loss_mask, [False]])))
        return [(int(start), int(stop)) for start, stop in edges.reshape(-1, 2)]

    def cut(self, max_length: int) -> "Sample":
        """Its first tokens."""
        return dataclasses.replace(
            self, input_ids=self.input_ids[:max_length], loss_mask=self.loss_mask[:max_length]
        )


@dataclasses.dataclass
class Report:
    """What was taken, what was left out and why, and what was taken but changed."""

    samples: int = 0
    tokens: int = 0
    loss_tokens: int = 0
    left_out: dict[str, int] = dataclasses.field(default_factory=dict)
    """How many by reason."""
    changed: dict[str, int] = dataclasses.field(default_factory=dict)
    examples: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    """The first few by reason, of both."""

    def take(self, sample: Sample) -> None:
        """Counts a sample."""
        self.samples += 1
        self.tokens += len(sample.input_ids)
        self.loss_tokens += int(sample.loss_mask.sum())

    def leave_out(self, reason: str, example: str) -> None:
        """Counts what is left out, and names it."""
        self._count(self.left_out, reason, example)

    def change(self, reason: str, example: str) -> None:
        """Counts what is taken, but not as it was."""
        self._count(self.changed, reason, example)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        lines = [f"{self.samples} samples, {self.tokens} tokens, {self.loss_tokens} to learn from"]
        for what, counts in (("left out", self.left_out), ("changed", self.changed)):
            for reason, count in sorted(counts.items(), key=lambda item: -item[1]):
                examples = self.examples[reason]
                more = ", ..." if count > len(examples) else ""
                lines.append(f"{what}: {count} x {reason} ({', '.join(examples)}{more})")
        return "\n".join(lines)

    def _count(self, counts: dict[str, int], reason: str, example: str) -> None:
        counts[reason] = counts.get(reason, 0) + 1
        examples = self.examples.setdefault(reason, [])
        if len(examples) < MAX_EXAMPLES:
            examples.append(example)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Header:
    """What every sample of a file has in common.

    `made_with` holds the options the samples depend on, and under "conditions" what else is known
    of the run.
    """

    vocab_size: int
    tokenizer_sha256: str
    chat_template_sha256: str | None
    made_with: dict[str, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, folder: str | Path, vocab_size: int, **made_with: Any) -> "Header":
        """For samples of the checkpoint in this folder."""
        return cls(
            vocab_size=vocab_size,
            tokenizer_sha256=_sha256(Path(folder) / "tiktoken.model"),
            chat_template_sha256=_template_sha256(Path(folder)),
            made_with=made_with,
        )

    def to_dict(self) -> dict[str, Any]:
        """The file's first line."""
        return {"format": FORMAT, "version": VERSION, **dataclasses.asdict(self)}

    def differences(self, other: "Header", *, with_options: bool = True) -> list[str]:
        """What differs, "name: ours, theirs" each; without options only what the target decides."""
        names = ("vocab_size", "tokenizer_sha256", "chat_template_sha256")
        pairs = {name: (getattr(self, name), getattr(other, name)) for name in names}
        if with_options:
            for name in sorted((self.made_with.keys() | other.made_with.keys()) - {*NOT_COMPARED}):
                # As they are once written: a tuple is a list.
                both = (self.made_with.get(name), other.made_with.get(name))
                pairs[name] = tuple(json.loads(json.dumps(value)) for value in both)
        return [
            f"{name}: {ours!r}, {theirs!r}"
            for name, (ours, theirs) in pairs.items()
            if ours != theirs
        ]


def read_header(path: str | Path) -> Header:
    """What the samples of a file were made with.

    Raises:
        SamplesError: no such file, or its first line is no header.
    """
    with _open(path) as file:
        return _header(path, file.readline())


def read_samples(
    path: str | Path,
    *,
    vocab_size: int,
    max_length: int,
    long: str = "skip",
) -> tuple[list[Sample], Report]:
    """The samples of a file that can be trained on, and what became of the others.

    Args:
        path: the samples file.
        vocab_size: the target's.
        max_length: most tokens of a sample.
        long: "skip" leaves out samples over `max_length`, "cut" cuts them.

    Raises:
        SamplesError: no such file, no header, or made with another vocabulary.
    """
    if long not in ("skip", "cut"):
        raise ValueError(f"long is {long!r}, expected 'skip' or 'cut'")
    if max_length < 2:
        raise ValueError(f"max_length is {max_length}, expected at least 2")
    samples, report, seen = [], Report(), set()
    with _open(path) as file:
        header = _header(path, file.readline())
        if header.vocab_size != vocab_size:
            raise SamplesError(
                f"{path}: made with a vocabulary of {header.vocab_size} ids, the target's has "
                f"{vocab_size}"
            )
        for number, line in enumerate(file, start=2):
            where = f"line {number}"
            if not line.endswith(b"\n"):
                report.leave_out("half-written last line", where)
                continue
            try:
                row = _row(line)
                where = row["id"]
                sample = _sample(row, vocab_size)
            except _BadRow as error:
                report.leave_out(str(error), where)
                continue
            if sample.id in seen:
                report.leave_out("id used before", where)
                continue
            seen.add(sample.id)
            if len(sample.input_ids) > max_length:
                if long == "skip":
                    report.leave_out(f"over {max_length} tokens", where)
                    continue
                sample = sample.cut(max_length)
                if not sample.loss_mask.any():
                    report.leave_out(f"nothing generated in the first {max_length} tokens", where)
                    continue
                report.change(f"cut to {max_length} tokens", where)
            report.take(sample)
            samples.append(sample)
    return samples, report


def digest_samples(samples: Iterable[Sample]) -> str:
    """Of everything the samples hold, in their order."""
    digest = hashlib.sha256()
    for sample in samples:
        digest.update(f"{sample.id} {len(sample.input_ids)}\n".encode())
        digest.update(sample.input_ids.tobytes() + sample.loss_mask.tobytes())
    return digest.hexdigest()[:16]


def read_all(
    paths: Iterable[str | Path], ours: Header, *, max_length: int, long: str = "skip"
) -> tuple[list[Sample], dict[str, Report]]:
    """The samples of several files, made for the target of `ours`, and a report on each.

    Raises:
        SamplesError: a file that cannot be read or was made for another target, of which no
            sample is left.
    """
    samples: list[Sample] = []
    told: dict[str, Report] = {}
    ids: set[str] = set()
    for path in paths:
        if differences := read_header(path).differences(ours, with_options=False):
            raise SamplesError(f"{path} was made for another target: {'; '.join(differences)}")
        found, report = read_samples(
            path, vocab_size=ours.vocab_size, max_length=max_length, long=long
        )
        told[str(path)] = report
        if not found:
            raise SamplesError(f"{path}: no sample is left\n{report}")
        for sample in found:
            if sample.id in ids:
                # The same prompt answered twice is two samples.
                sample = dataclasses.replace(sample, id=f"{path}:{sample.id}")
            ids.add(sample.id)
            samples.append(sample)
    return samples, told


class SamplesWriter:
    """Adds samples to a file, new or left by an earlier run with the same options.

    A last line that the earlier run did not finish is dropped. What is appended is on its way to
    the disk when `append` returns.
    """

    def __init__(self, path: str | Path, header: Header):
        """Opens the file.

        Raises:
            SamplesError: it exists and is no samples file, or was made with other options.
        """
        self.path = Path(path)
        check_resumable(path, header)
        self.report = Report()

        def read(line: bytes) -> str:
            sample = _sample(_row(line), header.vocab_size)
            self.report.take(sample)
            return sample.id

        try:
            self._lines = ResumableLines(path, read, header=header.to_dict())
        except ValueError as error:
            raise SamplesError(str(error)) from None
        self.num_resumed = self.report.samples

    def __contains__(self, id: str) -> bool:
        return id in self._lines

    def __enter__(self) -> "SamplesWriter":
        return self

    def __exit__(self, *_: Any) -> None:
        self._lines.close()

    def append(self, sample: Sample, **readable: Any) -> None:
        """Writes one sample, and what else a human may want to know of it."""
        row = {
            "id": sample.id,
            "input_ids": sample.input_ids.tolist(),
            "generated": sample.generated,
            **readable,
        }
        try:
            self._lines.append(sample.id, row)
        except ValueError as error:
            raise SamplesError(str(error)) from None
        self.report.take(sample)

    def row(self, id: str) -> dict[str, Any]:
        """The row with this id, read back."""
        return self._lines.row(id)


def check_resumable(path: str | Path, header: Header) -> None:
    """Refuses a file that a run with this header must not add to.

    Raises:
        SamplesError: it is no samples file, or names every option that differs.
    """
    if not Path(path).exists():
        return
    with _open(path) as file:
        line = file.readline()
    first = json.dumps({"format": FORMAT}).encode()[:-1]
    if not line.endswith(b"\n") and line.startswith(first[: len(line)]):
        return  # A run that was killed while it wrote its first line.
    if differences := _header(path, line).differences(header):
        raise SamplesError(
            f"{path} was made with other options (there, here): {'; '.join(differences)}"
        )


class _BadRow(ValueError):
    """Why a row is no sample: a reason to count by, without the row's own values."""


def _row(line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        raise _BadRow("not JSON") from None
    if not isinstance(row, dict):
        raise _BadRow("not a JSON object")
    if missing := [name for name in ("id", "input_ids", "generated") if name not in row]:
        raise _BadRow(f"no {missing[0]}")
    if not isinstance(row["id"], str) or not row["id"]:
        raise _BadRow("id is no text")
    return row


def _sample(row: dict[str, Any], vocab_size: int) -> Sample:
    ids = _integers(row["input_ids"], 1, "input_ids is no list of token ids")
    if ids.size and (ids.min() < 0 or ids.max() >= vocab_size):
        raise _BadRow("token ids outside the vocabulary")
    wrong = "generated is no list of [start, stop]"
    spans = row["generated"]
    spans = _integers(spans, 2, wrong) if spans != [] else np.zeros((0, 2), np.int64)
    if spans.shape[1] != 2:
        raise _BadRow(wrong)
    if not len(spans):
        raise _BadRow("nothing generated")
    starts, stops = spans.T
    are_apart = (starts < stops).all() and (stops[:-1] <= starts[1:]).all()
    # A first token has nothing before it to be generated from.
    if not are_apart or starts[0] < 1 or stops[-1] > len(ids):
        raise _BadRow("generated spans out of order or outside the sample")
    return Sample.of(row["id"], ids.tolist(), spans.tolist())


def _integers(value: Any, ndim: int, wrong: str) -> np.ndarray:
    if not isinstance(value, list) or not value:
        raise _BadRow(wrong)
    try:
        array = np.asarray(value)
    except (ValueError, OverflowError):
        raise _BadRow(wrong) from None
    if array.ndim != ndim or array.dtype != np.int64:
        raise _BadRow(wrong)
    return array


def _header(path: str | Path, line: bytes) -> Header:
    right = f'expected {{"format": "{FORMAT}", ...}} on the first line'
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        row = None
    if not isinstance(row, dict) or row.pop("format", None) != FORMAT:
        raise SamplesError(f"{path}: no samples file; {right}")
    if (version := row.pop("version", None)) != VERSION:
        raise SamplesError(f"{path}: version {version!r} of the format, this reads {VERSION}")
    types = {
        "vocab_size": int,
        "tokenizer_sha256": str,
        "chat_template_sha256": str | None,
        "made_with": dict,
    }
    wrong = [name for name, kind in types.items() if not isinstance(row.get(name, ...), kind)]
    if wrong or row.keys() - types.keys():
        names = ", ".join([*wrong, *sorted(row.keys() - types.keys())])
        raise SamplesError(f"{path}: its header lacks or has a wrong {names}")
    return Header(**row)


def _open(path: str | Path):
    try:
        return open(path, "rb")
    except OSError as error:
        raise SamplesError(f"{path}: {error.strerror}") from None


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _template_sha256(folder: Path) -> str | None:
    """Of the template file, or of the template in `tokenizer_config.json`; None without either."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return _sha256(path)
    try:
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    template = config.get("chat_template") if isinstance(config, dict) else None
    if template is None:
        return None
    return hashlib.sha256(json.dumps(template, sort_keys=True).encode()).hexdigest()
