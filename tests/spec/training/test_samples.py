"""Samples files: what is read, what is left out and counted, and how a killed writer goes on."""

import dataclasses
import json

import numpy as np
import pytest

from kimi_jax import DEMO
from spec.training.samples import (
    Header,
    Report,
    Sample,
    SamplesError,
    SamplesWriter,
    check_resumable,
    read_header,
    read_samples,
)

V = 4096
HEADER = Header(vocab_size=V, tokenizer_sha256="t", chat_template_sha256=None)


def sample(id="a", ids=(5, 6, 7, 8), generated=((2, 4),)):
    return Sample.of(id, ids, generated)


def row(id="a", input_ids=(5, 6, 7, 8), generated=((2, 4),), **more):
    return {"id": id, "input_ids": input_ids, "generated": generated, **more}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "samples.jsonl"


@pytest.fixture
def read(path):
    """What is read of these rows, texts as they are."""

    def read(*rows, **options):
        lines = [HEADER.to_dict(), *rows]
        text = "".join(x if isinstance(x, str) else json.dumps(x) + "\n" for x in lines)
        path.write_text(text, encoding="utf-8")
        return read_samples(path, **{"vocab_size": V, "max_length": 16, **options})

    return read


def equal(a: Sample, b: Sample) -> bool:
    same = (a.input_ids == b.input_ids).all() and (a.loss_mask == b.loss_mask).all()
    return a.id == b.id and bool(same)


def test_samples_come_back_as_they_were_written(path):
    given = [sample(), sample("b", range(9), [(1, 2), (4, 9)]), sample("ü\u2028", [1, 2], [(1, 2)])]
    with SamplesWriter(path, HEADER) as writer:
        for one in given:
            writer.append(one, text="for humans", finish_reason="stop")
    found, report = read_samples(path, vocab_size=V, max_length=16)
    assert all(map(equal, found, given)) and len(found) == 3
    assert found[0].input_ids.dtype == np.int32 and found[0].loss_mask.dtype == np.bool_
    assert found[1].loss_mask.tolist() == [0, 1, 0, 0, 1, 1, 1, 1, 1]
    assert found[1].generated == [(1, 2), (4, 9)]
    assert (report.samples, report.tokens, report.loss_tokens) == (3, 15, 9)
    assert report.left_out == report.changed == {}
    lines = path.read_text(encoding="utf-8").split("\n")
    assert len(lines) == 5 and json.loads(lines[1])["text"] == "for humans"


def test_spans_that_touch_are_one_in_the_mask(read):
    [found], _ = read(row(generated=[[1, 2], [2, 4]]))
    assert found.generated == [(1, 4)]


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ("{not json\n", "not JSON"),
        ("[" * 100_000 + "\n", "not JSON"),
        ("[1]\n", "not a JSON object"),
        ("\n", "not JSON"),
        ({"input_ids": [1, 2], "generated": [[1, 2]]}, "no id"),
        ({"id": "x", "generated": [[1, 2]]}, "no input_ids"),
        ({"id": "x", "input_ids": [1, 2]}, "no generated"),
        (row(7), "id is no text"),
        (row(""), "id is no text"),
        (row("x", []), "input_ids is no list of token ids"),
        (row("x", "ids"), "input_ids is no list of token ids"),
        (row("x", [1, 2.5, 3]), "input_ids is no list of token ids"),
        (row("x", [True, False]), "input_ids is no list of token ids"),
        (row("x", [[1], [2]]), "input_ids is no list of token ids"),
        (row("x", [1, [2]]), "input_ids is no list of token ids"),
        (row("x", [1, 10**30, 3]), "input_ids is no list of token ids"),
        (row("x", [1, 2, V, 3]), "token ids outside the vocabulary"),
        (row("x", [1, 2, -1, 3]), "token ids outside the vocabulary"),
        (row("x", generated=[]), "nothing generated"),
        (row("x", generated=3), "generated is no list of [start, stop]"),
        (row("x", generated=[1, 2]), "generated is no list of [start, stop]"),
        (row("x", generated=[[1, 2, 3]]), "generated is no list of [start, stop]"),
        (row("x", generated=[[2, 2]]), "generated spans out of order or outside the sample"),
        (row("x", generated=[[3, 2]]), "generated spans out of order or outside the sample"),
        (row("x", generated=[[0, 2]]), "generated spans out of order or outside the sample"),
        (row("x", generated=[[-2, 2]]), "generated spans out of order or outside the sample"),
        (row("x", generated=[[2, 5]]), "generated spans out of order or outside the sample"),
        (
            row("x", generated=[[1, 3], [2, 4]]),
            "generated spans out of order or outside the sample",
        ),
        (
            row("x", generated=[[3, 4], [1, 2]]),
            "generated spans out of order or outside the sample",
        ),
        (row("first"), "id used before"),
        (row("x", list(range(17))), "over 16 tokens"),
    ],
)
def test_a_bad_row_is_left_out_and_counted(read, bad, reason):
    found, report = read(row("first"), bad, row("last"))
    assert [one.id for one in found] == ["first", "last"]
    assert report.left_out == {reason: 1}
    has_id = isinstance(bad, dict) and isinstance(bad.get("id"), str) and bad["id"]
    is_whole = has_id and not reason.startswith("no ")
    assert report.examples[reason] == [bad["id"] if is_whole else "line 3"]


def test_long_samples_are_cut_where_something_generated_is_left(read):
    rows = [
        row("kept", list(range(4)), [[1, 2]]),
        row("cut", list(range(9)), [[1, 2], [3, 6], [7, 8]]),
        row("prompt alone", list(range(9)), [[4, 9]]),
    ]
    found, report = read(*rows, max_length=4, long="cut")
    assert [one.id for one in found] == ["kept", "cut"]
    assert found[1].input_ids.tolist() == [0, 1, 2, 3]
    assert found[1].generated == [(1, 2), (3, 4)]
    assert report.left_out == {"nothing generated in the first 4 tokens": 1}
    assert report.changed == {"cut to 4 tokens": 1}
    assert (report.samples, report.tokens, report.loss_tokens) == (2, 8, 3)


def test_a_half_written_last_line_is_counted(read):
    # Even a whole row: its writer will drop it and write it again.
    for rest in (json.dumps(row("b"))[:30], json.dumps(row("b"))):
        found, report = read(row(), rest)
        assert [one.id for one in found] == ["a"]
        assert report.left_out == {"half-written last line": 1}


def test_the_report_tells_a_human_and_json():
    report = Report()
    for number in range(5):
        report.leave_out("not JSON", f"line {number}")
    report.change("cut to 4 tokens", "long")
    report.take(sample())
    assert str(report).splitlines() == [
        "1 samples, 4 tokens, 2 to learn from",
        "left out: 5 x not JSON (line 0, line 1, line 2, ...)",
        "changed: 1 x cut to 4 tokens (long)",
    ]
    assert json.loads(json.dumps(report.to_dict()))["left_out"] == {"not JSON": 5}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no samples file; expected {"),
        ("plain text\n", "no samples file; expected {"),
        ('{"id": "a", "input_ids": [1]}\n', "no samples file; expected {"),
        (json.dumps(HEADER.to_dict() | {"version": 9}) + "\n", "version 9 of the format"),
        (json.dumps(HEADER.to_dict() | {"vocab_size": "x"}) + "\n", "wrong vocab_size"),
        (
            json.dumps({"format": HEADER.to_dict()["format"], "version": 1}) + "\n",
            "wrong vocab_size, tok",
        ),
        (json.dumps(HEADER.to_dict() | {"more": 1}) + "\n", "wrong more"),
        (
            json.dumps(HEADER.to_dict() | {"vocab_size": 5}) + "\n",
            "vocabulary of 5 ids, the target",
        ),
    ],
)
def test_a_file_that_is_no_samples_file_of_this_target_is_refused(path, text, message):
    path.write_text(text)
    with pytest.raises(SamplesError, match=str(path)) as error:
        read_samples(path, vocab_size=V, max_length=16)
    assert message in str(error.value)


def test_a_missing_file_and_wrong_options_are_refused(path, read):
    with pytest.raises(SamplesError, match="No such file"):
        read_samples(path, vocab_size=V, max_length=16)
    with pytest.raises(ValueError, match="long is 'drop', expected 'skip' or 'cut'"):
        read(row(), long="drop")
    with pytest.raises(ValueError, match="max_length is 1, expected at least 2"):
        read(row(), max_length=1)


# Writing.


def test_a_killed_writer_goes_on_wherever_it_was_killed(path):
    given = [sample("a"), sample("b", range(9), [(3, 9)]), sample("c")]
    with SamplesWriter(path, HEADER) as writer:
        for one in given:
            writer.append(one)
    whole = path.read_bytes()
    ends = [at + 1 for at, byte in enumerate(whole) if byte == ord("\n")]
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        with SamplesWriter(path, HEADER) as writer:
            assert writer.num_resumed == max(0, sum(end <= size for end in ends) - 1)
            for one in given:
                if one.id not in writer:
                    writer.append(one)
            assert writer.report.samples == 3 and writer.report.loss_tokens == 10
        assert path.read_bytes() == whole


def test_rows_are_read_back_between_appends(path):
    with SamplesWriter(path, HEADER) as writer:
        writer.append(sample("a"), finish_reason="stop")
    with SamplesWriter(path, HEADER) as writer:
        writer.append(sample("b", [1, 2, 3], [(1, 3)]))
        assert writer.row("a")["finish_reason"] == "stop"
        writer.append(sample("c"))
        assert writer.row("b")["input_ids"] == [1, 2, 3]
    assert [one.id for one in read_samples(path, vocab_size=V, max_length=9)[0]] == ["a", "b", "c"]


def test_an_id_is_written_once(path):
    with SamplesWriter(path, HEADER) as writer:
        writer.append(sample("a"))
        with pytest.raises(SamplesError, match="'a' is in it already"):
            writer.append(sample("a"))


def test_a_run_with_other_options_is_refused_by_name(path):
    def header(**options):
        return dataclasses.replace(HEADER, made_with=options)

    old = header(length=512, temperature=(0.0, 0.8), limit=3, conditions={"device": "cpu"})
    with SamplesWriter(path, old) as writer:
        writer.append(sample())
    before = path.read_bytes()
    with pytest.raises(SamplesError) as error:
        SamplesWriter(path, header(length=256, temperature=(0.0, 0.8), seed=1))
    assert "length: 512, 256; seed: None, 1" in str(error.value)
    assert "temperature" not in str(error.value) and "limit" not in str(error.value)
    with pytest.raises(SamplesError, match="tokenizer_sha256: 't', 'u'"):
        check_resumable(path, dataclasses.replace(old, tokenizer_sha256="u"))
    assert path.read_bytes() == before
    same = header(length=512, temperature=[0.0, 0.8], limit=9, conditions={"device": "gpu"})
    with SamplesWriter(path, same) as writer:
        assert "a" in writer
    assert read_header(path).made_with["limit"] == 3


def test_another_file_is_not_overwritten(path):
    for text in ("my notes\n", "my notes", '{"a": 1}\n'):
        path.write_text(text)
        with pytest.raises(SamplesError, match="no samples file"):
            SamplesWriter(path, HEADER)
        assert path.read_text() == text


def test_a_broken_row_before_the_last_is_named(path):
    with SamplesWriter(path, HEADER) as writer:
        writer.append(sample("a"))
        writer.append(sample("b"))
    text = path.read_text().replace('"generated": [[2, 4]]', '"generated": [[9, 4]]', 1)
    path.write_text(text)
    with pytest.raises(SamplesError, match="line 2: generated spans"):
        SamplesWriter(path, HEADER)


def test_the_header_tells_checkpoints_apart(tmp_path):
    ours = Header.of(DEMO, V, length=512)
    assert ours.differences(Header.of(DEMO, V, length=512)) == []
    (tmp_path / "tiktoken.model").write_bytes((DEMO / "tiktoken.model").read_bytes())
    theirs = Header.of(tmp_path, V, length=9)
    assert theirs.chat_template_sha256 is None
    assert [d.partition(":")[0] for d in ours.differences(theirs)] == [
        "chat_template_sha256",
        "length",
    ]
    assert len(ours.differences(theirs, with_options=False)) == 1
    config = {"chat_template": "{{ messages }}"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert Header.of(tmp_path, V).chat_template_sha256 is not None
