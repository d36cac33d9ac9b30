"""scripts/make_training_data.py: what it writes, how it goes on, and what it refuses.

Most tests call `main` in this process on one loaded model.
"""

import dataclasses
import json

import make_training_data
import pieces
import pytest
import train_demo

from kimi_jax import DEMO, LLM, SamplingParams
from kimi_jax.text.chat import ChatTemplate
from kimi_jax.text.reply import ReplyParser
from spec.training.samples import read_header, read_samples

LENGTH = 160
DOCUMENT = "".join(f"def f{i}(n):\n    return n * {i}\n\n\n" for i in range(60))


@pytest.fixture(scope="module")
def llm(tiny):
    with pieces.quick_compiles():
        yield LLM(tiny, max_length=LENGTH, max_batch=4, progress=False)


@pytest.fixture
def loaded(llm, monkeypatch) -> list[int]:
    """The script gets the loaded model; the list holds how many prompts ran together."""
    sizes = []
    generate = llm.generate

    def load(model, **kwargs):
        assert kwargs["max_length"] == LENGTH and kwargs["max_batch"] == 4
        return llm

    def counted(prompts, params):
        sizes.append(len(prompts))
        return generate(prompts, params)

    monkeypatch.setattr(make_training_data, "LLM", load)
    monkeypatch.setattr(llm, "generate", counted)
    return sizes


@pytest.fixture
def options(tiny, tmp_path) -> list[object]:
    (tmp_path / "doc.py").write_text(DOCUMENT)
    return [
        *("--model", tiny, "--length", LENGTH, "--batch", 4, "--prompt-tokens", 24),
        *("--max-new-tokens", 12, tmp_path / "doc.py"),
    ]


def run(capsys, *args: object) -> dict:
    code = make_training_data.main([str(arg) for arg in args])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    return json.loads(captured.out.splitlines()[-1])


def refused(capsys, *args: object) -> str:
    """The message of a run that ends with a wrong option."""
    with pytest.raises(SystemExit) as stop:
        make_training_data.main([str(arg) for arg in args])
    assert stop.value.code == 2
    return capsys.readouterr().err.rpartition("error: ")[2]


def failed(capsys, *args: object) -> str:
    """The message of a run that could not use what it was given."""
    assert make_training_data.main([str(arg) for arg in args]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err.rpartition("error: ")[2]


def rows_of(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()[1:]]


def read(path, llm):
    samples, report = read_samples(path, vocab_size=llm.cfg.vocab_size, max_length=LENGTH)
    assert report.left_out == report.changed == {}
    return {sample.id: sample for sample in samples}


# Answers anew.


@pytest.mark.slow
def test_greedy_samples_are_what_the_model_replies(loaded, llm, options, tmp_path, capsys):
    out = tmp_path / "new" / "out.jsonl"
    made = run(capsys, *options, "--out", out, "--temperature", 0, "--limit", 8)
    samples = read(out, llm)
    assert made["samples"] == len(samples) == 8 and loaded == [4, 4]
    ids = llm.tokenizer.encode(DOCUMENT)
    starts = [int(id.removeprefix("doc.py:")) * LENGTH for id in sorted(samples)]
    prompts = [ids[start : start + 24] for start in starts]
    expected = llm.generate(prompts, SamplingParams(max_new_tokens=12))
    for id, prompt, result in zip(sorted(samples), prompts, expected, strict=True):
        assert samples[id].input_ids.tolist() == [*prompt, *result.token_ids]
        assert samples[id].generated == [(24, 24 + len(result.token_ids))]
    assert made["tokens"] == sum(len(s.input_ids) for s in samples.values())
    assert made["loss_tokens"] == made["generated_tokens"]
    assert made["tokens_per_second"] > 0
    assert made["conditions"].keys() >= {"jax", "device", "commit", "batch", "options", "limit"}
    header = read_header(out)
    assert header.vocab_size == 512
    assert header.made_with["temperature"] == [0] and header.made_with["conditions"]["jax"]


@pytest.mark.slow
def test_temperatures_take_turns_and_each_sample_has_its_own_seed(
    loaded, llm, options, tmp_path, capsys
):
    out = tmp_path / "out.jsonl"
    run(capsys, *options, "--out", out, "--temperature", "0,1.5", "--limit", 8)
    rows = rows_of(out)
    assert sorted(row["temperature"] for row in rows) == [0] * 4 + [1.5] * 4
    assert len({row["seed"] for row in rows}) == 8
    rows.sort(key=lambda row: row["id"])
    params = [
        SamplingParams(max_new_tokens=12, temperature=row["temperature"], seed=row["seed"])
        for row in rows
    ]
    prompts = [row["input_ids"][:24] for row in rows]
    for row, result in zip(rows, llm.generate(prompts, params), strict=True):
        assert row["input_ids"][24:] == list(result.token_ids)
        assert row["finish_reason"] == result.finish_reason
    other = tmp_path / "other.jsonl"
    run(capsys, *options, "--out", other, "--temperature", "0,1.5", "--limit", 8, "--seed", 1)
    assert {row["seed"] for row in rows}.isdisjoint(row["seed"] for row in rows_of(other))


@pytest.fixture
def chats(tmp_path):
    """Conversations of one to three turns."""
    path = tmp_path / "chats.jsonl"
    rows = []
    for number in range(7):
        pairs = [
            ({"role": "user", "content": f"{'more ' * turn}{number}"}, {"role": "assistant"})
            for turn in range(1 + number % 3)
        ]
        rows.append({"id": f"c{number}", "messages": [m for pair in pairs for m in pair]})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def ending(llm, monkeypatch):
    """The model likes to end its turns."""
    wanted = {llm.tokenizer.special_id(name): 9.0 for name in ("</think>", "<|im_end|>")}

    def params(**fields):
        return SamplingParams(logit_bias=wanted, **fields)

    monkeypatch.setattr(make_training_data, "SamplingParams", params)


@pytest.mark.slow
def test_chats_go_on_from_their_new_answers_and_hold_the_stop_token(
    loaded, ending, llm, tiny, chats, tmp_path, capsys
):
    out = tmp_path / "out.jsonl"
    options = ("--model", tiny, "--length", LENGTH, "--batch", 4, "--temperature", 1)
    made = run(capsys, chats, *options, "--out", out)
    template = ChatTemplate.from_folder(tiny)
    by_id = {row["id"]: row for row in rows_of(out)}
    assert made["samples"] == len(by_id) and made["samples"] + sum(made["skipped"].values()) == 13
    end = llm.tokenizer.special_id("<|im_end|>")
    stops = {end, llm.tokenizer.special_id("[EOS]")}
    finishes = [row["finish_reason"] for row in by_id.values()]
    assert finishes.count("stop") >= 8
    num_later = 0
    for conversation in map(json.loads, chats.read_text().splitlines()):
        history = []
        for index, message in enumerate(conversation["messages"]):
            row = by_id.get(f"{conversation['id']}/{index}")
            if message["role"] == "user":
                history.append(message)
                continue
            if row is None:
                break
            [(start, stop)] = row["generated"]
            assert row["input_ids"][:start] == template.render(history)
            reply = row["input_ids"][start:stop]
            has_ended = row["finish_reason"] == "stop"
            assert (reply[-1] in stops) == has_ended and not stops & set(reply[:-1])
            parser = ReplyParser(llm.tokenizer, starts_in_thinking=True)
            parser.feed(reply[:-1] if has_ended else reply)
            history.append(parser.finish().to_message())
            num_later += index > 1
    assert num_later >= 3


@pytest.mark.slow
def test_a_killed_run_goes_on_and_writes_the_same_file(
    loaded, ending, tiny, chats, options, tmp_path, capsys
):
    out = tmp_path / "out.jsonl"
    args = (chats, *options, "--out", out, "--temperature", "0,1", "--limit", 21)
    first = run(capsys, *args)
    whole = out.read_bytes()
    num_runs = len(loaded)
    lines = whole.splitlines(keepends=True)
    # Inside the header, inside a row, between two rows, and at the end.
    for size in (9, len(lines[0]) + 20, len(b"".join(lines[:8])), len(whole) - 5, len(whole)):
        loaded.clear()
        out.write_bytes(whole[:size])
        again = run(capsys, *args)
        assert out.read_bytes() == whole
        assert again["resumed_samples"] == max(0, whole[:size].count(b"\n") - 1)
        for name in ("samples", "tokens", "loss_tokens", "skipped"):
            assert again[name] == first[name]
        assert len(loaded) <= num_runs - (size > len(b"".join(lines[:7])))
    assert loaded == [] and again["tokens_per_second"] is None


@pytest.mark.slow
def test_a_larger_limit_adds_to_the_file(loaded, options, tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    args = (*options, "--out", out, "--temperature", 0)
    run(capsys, *args, "--limit", 4)
    before = {row["id"]: row for row in rows_of(out)}
    made = run(capsys, *args, "--limit", 9)
    after = {row["id"]: row for row in rows_of(out)}
    assert (len(before), len(after), made["resumed_samples"]) == (4, 9, 4)
    assert before.items() <= after.items()


def test_other_options_and_other_inputs_are_refused_by_name(loaded, options, tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    run(capsys, *options, "--out", out, "--limit", 2)
    text = out.read_text()
    message = failed(capsys, *options, "--out", out, "--seed", 5, "--no-thinking")
    assert "made with other options" in message
    assert "seed: 0, 5" in message and "thinking: True, False" in message
    (tmp_path / "doc.py").write_text("changed")
    assert "inputs_sha256" in failed(capsys, *options, "--out", out)
    (tmp_path / "doc.py").write_text(DOCUMENT)
    row = text.splitlines()[1].replace('"input_ids": [', '"input_ids": [7, ')
    out.write_text(f"{text.splitlines()[0]}\n{row}\n")
    assert "there has another prompt" in failed(capsys, *options, "--out", out, "--limit", 2)


def test_a_prompt_too_long_is_counted_and_a_limit_counts_turns(
    loaded, tiny, tmp_path, chats, capsys
):
    rows = [{"id": "long", "messages": [{"role": "user", "content": "x" * LENGTH}]}]
    (tmp_path / "long.jsonl").write_text(json.dumps(rows[0]) + "\n")
    options = ("--model", tiny, "--length", LENGTH, "--batch", 4, "--max-new-tokens", 3)
    made = run(capsys, tmp_path / "long.jsonl", *options, "--out", tmp_path / "a.jsonl")
    assert made["samples"] == 0
    assert made["skipped"] == {f"prompt leaves no room in {LENGTH} tokens": 1}
    made = run(capsys, chats, *options, "--out", tmp_path / "b.jsonl", "--limit", 2)
    assert made["samples"] <= 2


# Answers as given, and inputs.


def test_kept_answers_need_no_model(tmp_path, capsys, monkeypatch):
    def never(*args, **kwargs):
        raise AssertionError("a model is loaded")

    monkeypatch.setattr(make_training_data, "LLM", never)
    rows = [
        {"id": "a", "conversations": [{"from": "human", "value": "hi"}]},
        {"id": "b", "messages": [{"role": "user", "content": "hi"}, {"role": "assistant"}]},
        {"id": "c", "text": "plain text"},
    ]
    path, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in [*rows, 3]))
    args = (path, "--out", out, "--keep-answers", "--no-thinking")
    made = run(capsys, *args)
    assert made["samples"] == 2
    assert made["skipped"] == {"not a JSON object": 1, "no assistant turn": 1}
    texts = {row["id"]: row["text"] for row in rows_of(out)}
    assert texts.keys() == {"b/1", "c:0"} and texts["b/1"] == "<|im_end|>"
    assert "plain text".endswith(texts["c:0"]) and len(texts["c:0"]) < len("plain text")
    whole = out.read_bytes()
    out.write_bytes(whole[:-9])
    assert run(capsys, *args)["resumed_samples"] == 1
    assert out.read_bytes() == whole


@pytest.mark.slow
def test_the_library_is_given_without_the_modules_held_out():
    train, held_out = train_demo.library_files()
    assert [path for _, path in make_training_data._files("stdlib")] == train
    found = make_training_data._files("stdlib-held-out")
    assert [path for _, path in found] == held_out
    assert all(name.startswith("stdlib-held-out/") for name, _ in found)


def test_the_command_as_users_give_it(script, tiny, tmp_path):
    out = tmp_path / "out.jsonl"
    made, before = script.json(
        *("make_training_data.py", "stdlib-held-out", "--out", out, "--limit", 2, "--batch", 2),
        *("--model", tiny, "--length", 240, "--max-new-tokens", 8, "--temperature", "0,0.8"),
    )
    assert made["samples"] == 2 and 2 <= made["loss_tokens"] <= 16
    assert before.startswith("2 samples, ")
    assert read_header(out).made_with["inputs"] == ["stdlib-held-out"]
    assert read_samples(out, vocab_size=512, max_length=240)[1].samples == 2


# Refusals.


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--temperature", "warm"], "--temperature is 'warm', expected numbers such as 0.8 or 0"),
        (["--temperature", "0,-1"], "temperature is -1.0, expected"),
        (["--top-p", "2"], "top_p is 2.0, expected"),
        (["--temperature", "0", "--top-k", "3"], "only with a --temperature over 0: --top-k"),
        (["--max-new-tokens", "0"], "max_new_tokens is 0, expected"),
        (["--length", "1"], "--length is 1, expected at least 2"),
        (["--length", "9", "--prompt-tokens", "9"], "--prompt-tokens is 9, expected 1 to 8"),
        (["--batch", "0"], "--batch is 0, expected at least 1"),
        (["--limit", "0"], "--limit is 0, expected at least 1"),
        (["--mesh", "rows=2"], "--mesh: "),
        (["--keep-answers", "--regenerate"], "not allowed with"),
        (
            ["--keep-answers", "--temperature", "1", "--batch", "2"],
            "not with --keep-answers: --temperature, --batch",
        ),
        (["--model", "no/such/folder"], "--model 'no/such/folder': no such folder"),
        (["nowhere.txt"], "nowhere.txt: no such file or folder"),
    ],
)
def test_wrong_options(args, message, tmp_path, capsys):
    out = tmp_path / "sub" / "out.jsonl"
    assert message in refused(capsys, "stdlib", "--out", out, *args)
    assert not out.parent.exists()


def test_a_folder_is_no_out_file(tmp_path, capsys):
    assert "is a folder, expected a file" in refused(capsys, "stdlib", "--out", tmp_path)


def test_what_the_checkpoint_and_the_inputs_must_be(tmp_path, tiny, capsys):
    out, path = tmp_path / "out.jsonl", tmp_path / "a.jsonl"
    path.write_text('{"id": "a", "text": "t"}\n')
    assert "--length is 4096, the model's limit 2048" in failed(
        capsys, path, "--out", out, "--length", 4096
    )
    path.write_text("oops\n")
    message = failed(capsys, path, "--out", out, "--model", tiny, "--length", 128)
    assert "no conversation and no text" in message and "1 x not JSON" in message
    path.write_text('{"id": "a", "text": "t"}\n')
    out.write_text("my notes\n")
    assert "no samples file" in failed(capsys, path, "--out", out)
    assert out.read_text() == "my notes\n"


def test_a_template_is_needed_for_conversations_alone(tmp_path, capsys):
    for name in ("config.json", "tiktoken.model", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((DEMO / name).read_bytes())
    rows = tmp_path / "a.jsonl"
    args = (rows, "--model", tmp_path, "--keep-answers")
    rows.write_text('{"id": "a", "text": "some text"}\n')
    assert run(capsys, *args, "--out", tmp_path / "out.jsonl")["samples"] == 1
    rows.write_text('{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant"}]}\n')
    assert "no chat template" in failed(capsys, *args, "--out", tmp_path / "out2.jsonl")
    assert dataclasses.asdict(read_header(tmp_path / "out.jsonl"))["chat_template_sha256"] is None
