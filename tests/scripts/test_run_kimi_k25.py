"""scripts/run_kimi_k25.py: a chat, a prompts file that resumes, and what is refused before loading.

Most tests call `main` in this process on one loaded model; the whole script, killed and started
again, runs in processes of its own (slow lane).
"""

import io
import json
import os
import shutil
import signal
import time
from pathlib import Path

import convert_checkpoint
import pytest
import run_kimi_k25
from make_random_drafter import tiny_drafter_config, write_random_drafter

from kimi_jax import DEMO, LLM, SamplingParams
from kimi_jax.config import ModelConfig
from kimi_jax.runtime import machine
from kimi_jax.runtime.machine import Device, Gpus


@pytest.fixture(scope="module")
def llm(tiny) -> LLM:
    return LLM(tiny, max_batch=1, max_length=200)


@pytest.fixture
def loaded(llm, monkeypatch) -> list[dict]:
    """The script gets the loaded model; the list holds the arguments it asked for."""
    calls = []

    def load(model, **kwargs):
        calls.append({"model": model, **kwargs})
        return llm

    monkeypatch.setattr(run_kimi_k25, "LLM", load)
    monkeypatch.setattr(llm.engine, "each_program", lambda: iter([("decode", 1, 256, None)]))
    for name in ("XLA_CLIENT_MEM_FRACTION", "NCCL_P2P_LEVEL"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
    yield calls


@pytest.fixture
def run(capsys, monkeypatch, tiny):
    """The script's JSON and what stands before it on stdout, and stderr; it must succeed."""

    def run(*args, stdin: str = "", model=tiny):
        monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
        words = ["--model", model, "--max-length", 200, *args]
        assert run_kimi_k25.main([str(word) for word in words]) == 0
        captured = capsys.readouterr()
        before, newline, last = captured.out.removesuffix("\n").rpartition("\n")
        return json.loads(last), before + newline, captured.err

    return run


@pytest.fixture
def failed(capsys, tiny):
    """The message of a run that could not use what it was given; nothing was loaded."""

    def failed(*args, model=tiny) -> str:
        words = ["--model", model, "--max-length", 200, *args]
        assert run_kimi_k25.main([str(word) for word in words]) == 1
        captured = capsys.readouterr()
        assert captured.out == ""
        return captured.err.partition("error: ")[2]

    return failed


@pytest.fixture
def prompts(tmp_path):
    """A file of these rows, and options that read it and write beside it."""

    def prompts(*rows):
        path = tmp_path / "in.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return "--prompts", path, "--out", tmp_path / "out.jsonl"

    return prompts


def read(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


# Chat.


@pytest.mark.slow
def test_a_chat_keeps_its_history_until_it_is_reset(loaded, llm, run):
    options = SamplingParams(max_new_tokens=6, temperature=1.0, top_p=0.95, seed=3)
    hello, again = ({"role": "user", "content": text} for text in ("hello", "again"))
    first = llm.chat([hello], options, thinking=False)
    message = {"role": "assistant", "content": first.text}
    second = llm.chat([hello, message, again], options, thinking=False)
    out, said, told = run(
        *("--chat", "--no-thinking", "--max-new-tokens", 6, "--seed", 3, "--temperature", 1),
        stdin="hello\n\nagain\n/help\n/reset\n/nothing\nhello\n/quit\nnever asked\n",
    )
    assert said == f"{first.text}\n{second.text}\n{first.text}\n"
    assert "a new conversation" in told and "/nothing is no command: /reset" in told
    assert told.count(run_kimi_k25.HELP) == 2
    assert (out["mode"], out["replies"], out["interrupted"]) == ("chat", 3, 0)
    assert out["new_tokens"] == sum(len(r.token_ids) for r in (first, second, first))
    assert out["tokens_per_second"] > 0 and out["speculation"] is None
    assert out["conditions"]["max_batch"] == 1 and out["warm_up"]["programs"] == 1
    assert loaded[0]["max_batch"] == 1


def test_the_end_of_stdin_ends_a_chat(loaded, run):
    out, said, _ = run("--chat", stdin="")
    assert (said, out["replies"]) == ("", 0)


def test_reasoning_and_a_system_message(loaded, llm, run):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}]
    params = SamplingParams(max_new_tokens=9, temperature=1.0, top_p=0.95, seed=0)
    expected = llm.chat(messages, params)
    assert expected.reasoning
    _, said, _ = run("--chat", "--system", "Be brief.", "--max-new-tokens", 9, stdin="hello\n")
    gap = "\n\n" if expected.text else ""
    assert said == f"{expected.reasoning}{gap}{expected.text}\n"


def test_a_conversation_that_is_too_long_stands_as_it_was(loaded, run):
    out, said, told = run(
        *("--chat", "--no-thinking", "--max-new-tokens", 3),
        stdin=f"hello\n{'x' * 300}\nagain\n",
    )
    assert out["replies"] == 2 and said.count("\n") == 2
    assert "/reset begins a new conversation" in told and "max_length is 200" in told


def test_ctrl_c_ends_the_reply_and_not_the_program(loaded, llm, run, monkeypatch):
    stream = llm.chat_stream

    def interrupted(messages, *args, **options):
        for number, piece in enumerate(stream(messages, *args, **options)):
            if number == 1 and messages[-1]["content"] == "long":
                os.kill(os.getpid(), signal.SIGINT)
            yield piece

    monkeypatch.setattr(llm, "chat_stream", interrupted)
    options = ("--chat", "--no-thinking", "--temperature", 1, "--max-new-tokens", 100)
    out, _, told = run(*options, stdin="long\nshort\n")
    assert (out["interrupted"], out["replies"]) == (1, 1)
    assert "[ended after " in told
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


# A prompts file.

ROWS = (
    {"id": "a", "prompt": "def f(n):", "max_new_tokens": 5},
    {"id": "b", "messages": [{"role": "user", "content": "hello"}], "max_new_tokens": 7},
    {"id": "c", "prompt": "x", "max_new_tokens": 4, "temperature": 1.0, "logprobs": 1},
)


def test_replies_are_written_and_not_asked_for_again(loaded, llm, run, prompts, tmp_path):
    options = prompts(*ROWS)
    out, said, told = run(*options)
    assert said == "" and "3 prompts, 0 of them answered" in told
    replies = {row["id"]: row for row in read(tmp_path / "out.jsonl")}
    [expected] = llm.generate("def f(n):", SamplingParams(max_new_tokens=5))
    assert replies["a"]["token_ids"] == list(expected.token_ids)
    assert replies["a"]["text"] == expected.text and replies["a"]["finish_reason"] == "length"
    assert replies["b"]["reasoning"] and replies["b"]["usage"]["new_tokens"] == 7
    assert len(replies["c"]["logprobs"]) == 4
    assert (out["rows"], out["resumed_rows"], out["replies"], out["new_tokens"]) == (3, 0, 3, 16)
    assert out["finish_reasons"] == {"length": 3}
    assert out["memory"]["needed_bytes"] > 0 and out["memory"]["after_load_bytes"] is None
    # Of the second row only a part, as after a kill.
    path = tmp_path / "out.jsonl"
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    path.write_bytes(whole[: first + 40])
    out, _, told = run(*options)
    assert "3 prompts, 1 of them answered" in told
    assert (out["resumed_rows"], out["replies"]) == (1, 2)
    assert path.read_bytes() == whole
    out, _, _ = run(*options)
    assert (out["resumed_rows"], out["replies"], out["load_seconds"]) == (3, 0, None)
    assert len(loaded) == 2


def test_other_prompts_options_and_models_are_refused(loaded, run, failed, prompts, tiny):
    options = prompts(*ROWS)
    run(*options)
    assert "'a' was answered with another sampling" in failed(*options, "--stop", "z")
    assert "'a' was answered with another sampling" in failed(*options, "--seed", 1)
    assert "another dtype" in failed(*options, "--dtype", "bfloat16")
    assert "another max_length" in failed(*options, "--max-length", 150)
    changed = [{**ROWS[0], "prompt": "other"}, *ROWS[1:]]
    assert "'a' was answered with another prompt" in failed(*prompts(*changed))
    assert len(loaded) == 1


def test_replies_of_two_models_do_not_mix(loaded, run, failed, prompts, tiny, tmp_path):
    options = prompts(*ROWS)
    published = Path(shutil.copytree(tiny, tmp_path / "published"))
    run(*options, model=published)
    converted = tmp_path / "converted"
    assert convert_checkpoint.main([str(published), str(converted), "--quiet"]) == 0
    out, _, _ = run(*options, model=converted)
    assert (out["resumed_rows"], out["load_seconds"]) == (3, None)
    # Other weights of the same size.
    (weights,) = published.glob("*.safetensors")
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert "'a' was answered with another model;" in failed(*options, model=published)


def test_a_model_of_the_hub_is_the_same_at_the_next_start(
    loaded, run, prompts, tiny, monkeypatch, tmp_path
):
    """The small files come first, the shards later: the first start sees the folder grow."""
    cached, asked = tmp_path / "cached", []
    cached.mkdir()

    def resolve(path, *, patterns=("*",)):
        asked.append(patterns)
        for path in (path for pattern in patterns for path in tiny.glob(pattern)):
            shutil.copy(path, cached)
        return cached

    monkeypatch.setattr(run_kimi_k25, "resolve", resolve)
    options = prompts(*ROWS)
    run(*options, model="owner/name")
    assert asked == [run_kimi_k25.SMALL_FILES, ("*",)]
    out, _, _ = run(*options, model="owner/name")
    assert out["resumed_rows"] == 3


def test_the_dtype_of_the_run_counts_not_how_it_was_chosen(loaded, run, failed, prompts):
    options = prompts(*ROWS)
    run(*options)
    out, _, _ = run(*options, "--dtype", "float32")
    assert out["resumed_rows"] == 3


def test_a_drafter_counts_where_replies_depend_on_it(
    loaded, run, failed, prompts, tiny, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    cfg = tiny_drafter_config("llama", ModelConfig.from_folder(tiny))
    for name, seed in (("drafter", 1), ("another", 2)):
        Path(name).mkdir()
        write_random_drafter(Path(name), cfg, seed=seed)
    options = (*prompts(*ROWS), "--lossy-threshold", 0.5, "--drafter")
    run(*options, "drafter")
    for same in ("./drafter", tmp_path / "drafter"):
        out, _, _ = run(*options, same, "--draft-tokens", 3)
        assert out["resumed_rows"] == 3
    assert "another drafting" in failed(*options, "another")
    assert "another drafting" in failed(*options, "drafter", "--draft-tokens", 2)
    shutil.rmtree("drafter")
    shutil.move("another", "drafter")
    assert "another drafting" in failed(*options, "drafter")


def test_options_that_no_row_heeds_are_refused(loaded, failed, prompts, tiny, tmp_path):
    write_random_drafter(tmp_path, tiny_drafter_config("llama", ModelConfig.from_folder(tiny)))
    greedy = prompts({"id": "a", "prompt": "x"})
    message = failed(*greedy, "--drafter", tmp_path, "--lossy-threshold", 0.5)
    assert "only with a --temperature over 0: --lossy-threshold" in message
    assert "--no-thinking is for rows with messages" in failed(*greedy, "--no-thinking")
    hello = [{"role": "user", "content": "hello"}]
    thinks = prompts({"id": "a", "messages": hello, "thinking": True})
    assert "--no-thinking is for rows with messages" in failed(*thinks, "--no-thinking")
    assert loaded == []


def test_rows_that_cannot_run_are_named_before_loading(loaded, failed, prompts):
    assert "line 1: temprature: unknown" in failed(
        *prompts({"id": "a", "prompt": "x", "temprature": 1})
    )
    assert "has 200 tokens and leaves no room" in failed(*prompts({"id": "a", "prompt": "x" * 200}))
    assert loaded == []


# Machines.


def test_too_little_memory_is_found_before_loading(loaded, failed, monkeypatch):
    def devices(kind: str, memory: int | None):
        monkeypatch.setattr(
            machine,
            "devices_of",
            lambda given: [Device(kind=kind, platform="cpu", memory_bytes=memory)] * len(given),
        )

    devices("cpu", 400_000)
    message = failed("--chat", "--mesh", "tensor=2", "--max-new-tokens", 3)
    assert "too little memory" in message and "each has 0.00 GB" in message
    assert "What would fit: " in message and loaded == []


def test_gpus_that_jax_does_not_see_are_not_passed_over(loaded, failed, monkeypatch):
    monkeypatch.setattr(
        machine, "find_gpus", lambda: Gpus(names=("H100",), driver="580.1", plugin=None)
    )
    monkeypatch.delenv("JAX_PLATFORMS")
    message = failed("--chat")
    assert 'pip install "kimi-jax[cuda13]"' in message and loaded == []


def test_a_platform_that_is_not_there(loaded, failed, monkeypatch):
    message = failed("--chat", "--platform", "gpu")
    assert "no gpu device" in message
    monkeypatch.setattr(
        machine, "find_gpus", lambda: Gpus(names=("H100",), driver=None, plugin=None)
    )
    message = failed("--chat", "--platform", "gpu")
    assert "the NVIDIA driver does not answer" in message and loaded == []


def test_mixed_devices_and_too_few_are_refused(loaded, failed, monkeypatch):
    # As on a machine whose GPUs are fewer.
    monkeypatch.setattr(run_kimi_k25.flags, "simulate_mesh", lambda sizes: None)
    assert "needs 16 devices, 8 cpu found" in failed("--chat", "--mesh", "expert=4,tensor=4")
    kinds = iter(["A", "B"] * 8)
    monkeypatch.setattr(
        machine,
        "devices_of",
        lambda given: [Device(kind=next(kinds), platform="cpu", memory_bytes=None) for _ in given],
    )
    assert "the mesh mixes devices" in failed("--chat", "--mesh", "tensor=2")
    assert loaded == []


def test_a_probe_writes_what_plan_reads(loaded, run, monkeypatch, tmp_path):
    probe = run_kimi_k25.probe_collectives
    monkeypatch.setattr(probe, "MOST_BYTES", probe.LEAST_BYTES)
    parser = probe.make_parser()
    parser.set_defaults(repeats=1, turns=1)
    monkeypatch.setattr(probe, "make_parser", lambda: parser)
    out = tmp_path / "measured.json"
    _, said, told = run("--chat", "--mesh", "tensor=2", "--probe", "--probe-out", out)
    assert said == "" and "all-reduce" in told
    measured = json.loads(out.read_text())
    assert measured["measures"] == "collectives" and len(measured["rows"]) == 2


# Options.


@pytest.mark.parametrize(
    "options, message",
    [
        ("", "one of the arguments --chat --prompts is required"),
        ("--chat --prompts x", "not allowed with argument --chat"),
        ("--chat --out x", "only with --prompts: --out"),
        ("--chat --max-batch 2", "only with --prompts: --max-batch"),
        ("--prompts x", "--prompts needs --out"),
        ("--prompts x --out y --system z", "only with --chat: --system"),
        ("--prompts x --out none/y", "--out none/y: expected a file in a folder that is there"),
        ("--prompts x --out y --max-batch 0", "--max-batch is 0, expected at least 1"),
        ("--prompts x --out y --top-p 3", "top_p is 3.0, expected a number over 0"),
        ("--chat --probe-out x", "only with --probe: --probe-out"),
        ("--chat --max-length 1", "--max-length is 1, expected at least 2"),
        ("--chat --mesh 8", "--mesh: mesh '8': expected e.g. 'tensor=8'"),
        ("--chat --nccl PROTO=LL", "'PROTO=LL': expected e.g. NCCL_PROTO=LL"),
        ("--chat --drafter none --tree 4,2,2", "only with a --drafter: --tree"),
        ("--chat --temperature 0 --top-k 4", "only with a --temperature over 0 (0 here): --top-k"),
        ("--chat --model nowhere/at/all", "--model 'nowhere/at/all': no such folder"),
    ],
)
def test_wrong_options(capsys, options, message):
    with pytest.raises(SystemExit) as stop:
        run_kimi_k25.main(options.split())
    assert stop.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_a_prompts_file_that_is_not_there(failed, tmp_path):
    message = failed("--prompts", tmp_path / "none.jsonl", "--out", tmp_path / "out.jsonl")
    assert "none.jsonl" in message


def test_a_drafter_of_another_model_is_refused_before_loading(loaded, failed, tiny, tmp_path):
    cfg = tiny_drafter_config("llama", ModelConfig.from_folder(tiny), vocab_size=128)
    write_random_drafter(tmp_path, cfg)
    assert "vocab" in failed("--chat", "--drafter", tmp_path)
    assert loaded == []


# The whole of it.


@pytest.mark.slow
def test_killed_and_started_again_nothing_is_lost_or_repeated(script, tmp_path):
    """The demo over eight simulated devices, fifty rows of every kind.

    With a random drafter: the demo's own has two key-value heads, which eight devices do not share.
    """
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "intermediate_size": 64}
    cfg = tiny_drafter_config("llama", ModelConfig.from_folder(DEMO), **heads)
    drafter = tmp_path / "drafter"
    drafter.mkdir()
    write_random_drafter(drafter, cfg)
    rows = []
    for n in range(50):
        row = {"id": f"row {n}", "max_new_tokens": 4 + (7 * n) % 40}
        if n % 5 == 4:
            row |= {"messages": [{"role": "user", "content": f"Write {n}."}], "thinking": False}
        else:
            row |= {"prompt": ("def f", "import ", "class ")[n % 3] + "x" * (n % 4)}
        if n % 2:
            row["temperature"] = 0.8
        rows.append(row)
    given = tmp_path / "in.jsonl"
    given.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ("--prompts", given, "--mesh", "tensor=8", "--max-length", 200, "--max-batch", 4)
    options += ("--drafter", drafter, "--draft-tokens", 2)

    def command(out):
        return ("run_kimi_k25.py", *options, "--out", out)

    unbroken, broken = tmp_path / "unbroken.jsonl", tmp_path / "broken.jsonl"
    out, _ = script.json(*command(unbroken))
    assert (out["rows"], out["replies"], out["conditions"]["device_count"]) == (50, 50, 8)
    assert out["speculation"]["drafted"] == 2 * out["speculation"]["cycles"] > 0
    for least in (5, 20):
        killed = script.start(*command(broken))
        while killed.poll() is None and num_lines(broken) < least:
            time.sleep(0.01)
        killed.kill()
        killed.communicate()
    before = num_lines(broken)
    assert 20 <= before < 50
    with open(broken, "ab") as file:
        file.write(b'{"id": "row 4", "te')
    out, _ = script.json(*command(broken))
    assert (out["resumed_rows"], out["replies"]) == (before, 50 - before)
    found, expected = ({row["id"]: row for row in read(path)} for path in (broken, unbroken))
    assert len(read(broken)) == 50 and found.keys() == expected.keys()
    for id, reply in expected.items():
        assert found[id] == reply


def num_lines(path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0
