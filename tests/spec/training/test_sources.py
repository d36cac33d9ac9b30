"""Input files to conversations and texts: spellings that are read, and rows that are not."""

import json

import pytest

from spec.training.samples import Report
from spec.training.sources import Conversation, SourceError, Text, files_in, read_sources

HI = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.fixture
def read(tmp_path):
    """What is read of one .jsonl file with these rows, texts as they are."""

    def read(*rows):
        path = tmp_path / "rows.jsonl"
        path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in rows))
        report = Report()
        return read_sources(files_in(path), report)[0], report

    return read


@pytest.mark.parametrize(
    "row",
    [
        {"conversations": HI},
        {"messages": HI, "more": 1, "text": None},
        {
            "conversations": [
                {"from": "human", "value": "hi"},
                {"from": "gpt", "value": "yes", "weight": None},
            ]
        },
        {"conversations": [{"from": "user", "value": "hi"}, HI[1]]},
    ],
)
def test_spellings_of_a_conversation(read, row):
    [found], report = read({"id": "a"} | row)
    assert found == Conversation(id="a", messages=HI)
    assert report.left_out == {}


def test_tools_and_reasoning_come_along(read):
    turn = {"role": "assistant", "content": None, "reasoning": "hm", "tool_calls": [TOOL]}
    [found], _ = read({"id": 7, "conversations": [HI[0], turn], "tools": [TOOL]})
    assert isinstance(found, Conversation) and found.id == "7" and found.tools == [TOOL]
    assert found.messages[1]["reasoning_content"] == "hm"
    assert found.messages[1]["tool_calls"][0]["id"] == "functions.f:0"
    [found], _ = read({"conversations": [{"from": "system", "value": "s"}, HI[0]]})
    assert isinstance(found, Conversation)
    assert (found.id, found.messages[0]["role"]) == ("rows.jsonl:1", "system")


def test_texts_of_rows_and_of_files(read, tmp_path):
    [found], _ = read({"id": "a", "text": "one\u2028two"})
    assert found == Text(id="a", text="one\u2028two")
    (tmp_path / "notes.rst").write_text("all of\nit")
    assert read_sources(files_in(tmp_path / "notes.rst"), Report())[0] == [
        Text(id="notes.rst", text="all of\nit")
    ]


@pytest.mark.parametrize(
    ("row", "reason", "detail"),
    [
        ("{oops", "not JSON", "Expecting"),
        ("[]", "not a JSON object", ""),
        ({"id": "x"}, "neither conversations nor messages nor text", ""),
        ({"id": "x", "text": "a", "messages": HI}, "several of conversations, messages", ""),
        ({"id": [1], "text": "a"}, "id is neither text nor a number", "[1]"),
        ({"id": "", "text": "a"}, "id is neither text nor a number", "''"),
        ({"id": "x", "text": " \n"}, "empty text", ""),
        ({"id": "x", "text": 3}, "not text", ""),
        ({"id": "x", "messages": []}, "not a conversation", "messages is empty"),
        ({"id": "x", "messages": "hi"}, "not a conversation", "expected a list of messages"),
        ({"id": "x", "messages": ["hi"]}, "not a conversation", "messages[0] is a str"),
        (
            {"id": "x", "conversations": [{"from": "bing", "value": "hi"}]},
            "not a conversation",
            "messages[0] has the role 'bing', expected one of system, user",
        ),
        ({"id": "x", "messages": HI, "tools": "f"}, "not a conversation", "tools is a str"),
        (
            {"id": "x", "messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "not a conversation",
            "only text is read",
        ),
        ({"id": "first", "text": "again"}, "id used before", ""),
    ],
)
def test_a_bad_row_is_left_out_and_counted(read, row, reason, detail):
    found, report = read({"id": "first", "text": "a"}, row, "", {"id": "last", "text": "b"})
    assert [source.id for source in found] == ["first", "last"]
    [(counted, count)] = report.left_out.items()
    assert counted.startswith(reason) and count == 1
    [example] = report.examples[counted]
    assert example.startswith("first" if reason == "id used before" else "rows.jsonl:2")
    assert detail in example


def test_a_folder_is_all_that_can_be_read_in_it(tmp_path):
    top = tmp_path / "data"
    (top / "sub").mkdir(parents=True)
    for name in ("b.py", "sub/a.md", "sub/c.txt", "left.bin"):
        (top / name).write_text(f"text of {name}")
    (top / "d.jsonl").write_text('{"id": "row", "text": "t"}\n')
    (top / "empty.txt").write_text("\n")
    (top / "latin.txt").write_bytes(b"\xe9t\xe9")
    report = Report()
    found, _ = read_sources(files_in(top), report)
    assert [source.id for source in found] == [
        *("data/b.py", "row", "data/sub/a.md", "data/sub/c.txt"),
    ]
    assert report.left_out == {"empty text": 1, "file not UTF-8": 1}
    assert report.examples["empty text"] == ["data/empty.txt"]


def test_the_digest_tells_files_apart(tmp_path):
    path = tmp_path / "a.txt"
    digests = set()
    for text in ("one", "two", "one"):
        path.write_text(text)
        digests.add(read_sources(files_in(path), Report())[1])
    digests.add(read_sources([("b.txt", path)], Report())[1])
    assert len(digests) == 3


def test_inputs_that_are_not_there_are_refused(tmp_path):
    with pytest.raises(SourceError, match="nowhere: no such file or folder"):
        files_in(tmp_path / "nowhere")
    (tmp_path / "a.bin").write_text("x")
    with pytest.raises(SourceError, match=r"no file in it ends in \.jsonl, \.md, \.py, \.txt"):
        files_in(tmp_path)
