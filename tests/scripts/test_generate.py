"""scripts/generate.py: its options, its output, and how it fails.

Most tests call `main` in this process on one loaded model; what depends on the process (simulated
devices, signals, closed pipes, the demo) starts a new one.
"""

import dataclasses
import json
import signal

import generate
import pytest

from kimi_jax import LLM, SamplingParams
from kimi_jax.runtime.replies import Piece
from kimi_jax.runtime.requests import INSTANT_SAMPLING, THINKING_SAMPLING

KEYS = {
    "text",
    "token_ids",
    "finish_reason",
    "prompt_tokens",
    "new_tokens",
    "tokens_per_second",
    "cycles",
    "compiles",
    "conditions",
}
CONDITIONS = {
    "jax",
    "kimi_jax",
    "python",
    "platform",
    "device",
    "xla_flags",
    "mesh",
    "model",
    "dtype",
    "max_length",
    "context_length",
    "seed",
    "commit",
    "sampling",
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


@pytest.fixture(scope="module")
def llm(tiny) -> LLM:
    return LLM(tiny, max_batch=1)


@pytest.fixture
def loaded(llm, monkeypatch) -> list[dict]:
    """`generate` gets the loaded model; the list holds the arguments it asked for."""
    calls = []

    def load(model, **kwargs):
        calls.append({"model": model, **kwargs})
        return llm

    monkeypatch.setattr(generate, "LLM", load)
    return calls


def run(capsys, *args: object) -> tuple[dict, str]:
    assert generate.main([str(arg) for arg in args]) == 0
    before, newline, last = capsys.readouterr().out.removesuffix("\n").rpartition("\n")
    return json.loads(last), before + newline


def refused(capsys, *args: object) -> str:
    """The message of a run that ends with a wrong option."""
    with pytest.raises(SystemExit) as stop:
        generate.main([str(arg) for arg in args])
    assert stop.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    last = captured.err.splitlines()[-1]
    assert "error: " in last
    return last.partition("error: ")[2]


def failed(capsys, *args: object) -> str:
    """The message of a run that could not use what it was given."""
    assert generate.main([str(arg) for arg in args]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err.partition("error: ")[2]


# Output.


def test_completion_is_greedy_and_reads_on_from_the_prompt(loaded, llm, tiny, capsys):
    out, before = run(capsys, "--model", tiny, "--prompt", "def f(n):", "--max-new-tokens", 12)
    [expected] = llm.generate("def f(n):", SamplingParams(max_new_tokens=12))
    assert out["token_ids"] == list(expected.token_ids)
    assert out["text"] == expected.text
    assert before == f"def f(n):{expected.text}\n"
    assert out["finish_reason"] == "length"
    assert (out["prompt_tokens"], out["new_tokens"], out["cycles"]) == (9, 12, 12)
    assert out.keys() >= KEYS and out["conditions"].keys() >= CONDITIONS
    assert out["conditions"]["context_length"] == 21
    assert out["conditions"]["sampling"]["temperature"] == 0
    assert out["tokens_per_second"] > 0
    assert loaded[0]["model"] == tiny


def test_quiet_prints_the_json_line_alone(loaded, tiny, capsys):
    args = ("--model", tiny, "--prompt", "a", "--max-new-tokens", 3, "--quiet")
    assert generate.main([str(arg) for arg in args]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert len(captured.out.splitlines()) == 1
    assert len(json.loads(captured.out)["token_ids"]) == 3


def test_seeds_repeat_and_differ(loaded, tiny, capsys):
    def ids(*args):
        options = ("--model", tiny, "--prompt", "a", "--max-new-tokens", 16, "--temperature", 1)
        return run(capsys, *options, *args)[0]["token_ids"]

    assert ids() == ids("--seed", 0) != ids("--seed", 1)
    assert ids("--top-k", 1) == ids("--top-p", 1e-6)


def test_a_stop_string_ends_the_text(loaded, tiny, capsys):
    options = ("--model", tiny, "--prompt", "def f(n):", "--max-new-tokens", 12)
    text = run(capsys, *options)[0]["text"]
    out, before = run(capsys, *options, "--stop", "nowhere in it", f"--stop={text[3:5]}")
    assert out["finish_reason"] == "stop"
    assert out["text"] == text[: text.index(text[3:5])]
    assert before == f"def f(n):{out['text']}\n"


def test_empty_prompt_begins_with_bos(loaded, tiny, capsys):
    out, _ = run(capsys, "--model", tiny, "--prompt", "", "--max-new-tokens", 2)
    assert (out["prompt_tokens"], out["new_tokens"]) == (1, 2)


def test_text_the_terminal_cannot_show_is_replaced(loaded, tiny, capsys):
    # How Python hands over an argument that is not UTF-8.
    out, before = run(capsys, "--model", tiny, "--prompt", "a\udcff", "--max-new-tokens", 2)
    assert before.startswith("a?") and len(out["token_ids"]) == 2


@pytest.mark.parametrize(
    "flags, published", [((), THINKING_SAMPLING), (("--no-thinking",), INSTANT_SAMPLING)]
)
def test_chat(loaded, llm, tiny, tmp_path, capsys, flags, published):
    tools = tmp_path / "tools.json"
    tools.write_text(json.dumps([WEATHER]))
    options = ("--model", tiny, "--chat", "--prompt", "é", "--max-new-tokens", 8, "--seed", 3)
    out, before = run(capsys, *options, "--system", "Be brief.", *flags)
    sampling = out["conditions"]["sampling"]
    assert (sampling["temperature"], sampling["top_p"]) == (published.temperature, published.top_p)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "é"}]
    params = SamplingParams(
        max_new_tokens=8, seed=3, temperature=published.temperature, top_p=published.top_p
    )
    expected = llm.chat(messages, params, thinking=not flags)
    assert out["token_ids"] == list(expected.token_ids)
    assert (out["text"], out["reasoning"]) == (expected.text, expected.reasoning)
    assert before == f"{expected.reasoning}{expected.text}\n"  # one of them is empty
    with_tools, _ = run(capsys, *options, "--tools", tools, *flags)
    assert (with_tools["tool_calls"], with_tools["malformed_calls"]) == ([], [])
    assert (
        with_tools["prompt_tokens"]
        == llm.chat_request(
            messages[1:], params, thinking=not flags, tools=[WEATHER]
        ).prompt.__len__()
    )


def test_a_blank_line_parts_reasoning_from_the_answer(loaded, llm, tiny, capsys, monkeypatch):
    result = llm.chat([{"role": "user", "content": "a"}], SamplingParams(max_new_tokens=1))
    result = dataclasses.replace(result, text="An answer.", reasoning="Let me see.")
    pieces = [
        Piece(reasoning="Let me "),
        Piece(reasoning="see.", text="An "),
        Piece(text="answer.", result=result),
    ]
    monkeypatch.setattr(llm, "chat_stream", lambda *_, **__: iter(pieces))
    out, before = run(capsys, "--model", tiny, "--prompt", "a", "--chat")
    assert before == "Let me see.\n\nAn answer.\n"
    assert (out["reasoning"], out["text"]) == ("Let me see.", "An answer.")


def test_options_reach_the_model(loaded, tiny, capsys):
    args = ["--model", tiny, "--prompt", "a", "--max-new-tokens", 1, "--mesh", "tensor=8"]
    args += ["--dtype", "bfloat16", "--max-length", 64, "--latent-norm-eps", 1e-5]
    run(capsys, *args, "--platform", "cpu")
    (call,) = loaded
    assert call == {
        "model": tiny,
        "drafter": None,
        "mesh": {"tensor": 8},
        "max_length": 64,
        "max_batch": 1,
        "dtype": "bfloat16",
        "platform": "cpu",
        "latent_norm_eps": 1e-5,
        "cache": "replicated",
        "progress": True,
    }


# Refusals: before the model is loaded.


@pytest.mark.parametrize(
    "args, message",
    [
        (["--model", "/no/such/folder"], "--model '/no/such/folder': no such folder"),
        (["--model", "no-such-name"], "no such folder (a hub id is written owner/name)"),
        (["--model", __file__], "is a file; give the folder that holds it"),
        (["--model", ""], "no such folder"),
        (["--no-thinking", "--system", "a"], "only with --chat: --no-thinking, --system"),
        (["--tools", "x.json"], "only with --chat: --tools"),
        (["--chat", "--tools", "/no/such.json"], "--tools /no/such.json: No such file"),
        (["--chat", "--tools", __file__], "not JSON"),
        (["--top-p", "0.9"], "only with a --temperature over 0 (0 here): --top-p"),
        (["--chat", "--temperature", "0", "--top-k", "5"], "--top-k"),
        (["--temperature", "-1", "--top-p", "2"], "top_p is 2.0"),
        (["--temperature", "nan"], "temperature is nan"),
        (["--temperature", "warm"], "argument --temperature"),
        (["--top-k", "-2"], "top_k is -2"),
        (["--max-new-tokens", "0"], "max_new_tokens is 0"),
        (["--seed", "-1"], "seed is -1"),
        (["--stop", ""], "stop is"),
        (["--mesh", "tensor=0"], "--mesh: mesh 'tensor=0': expected"),
        (["--mesh", "data=2"], "--mesh: mesh 'data=2': expected"),
        (["--dtype", "int4"], "argument --dtype"),
        (["--platform", "tpu"], "argument --platform"),
        (["--max-length", "1"], "--max-length is 1, expected at least 2"),
        (["--latent-norm-eps", "0"], "--latent-norm-eps is 0.0"),
        (["--max-new", "5"], "unrecognized arguments: --max-new"),
    ],
    ids=lambda value: " ".join(value)[-40:] if isinstance(value, list) else "",
)
def test_wrong_options(args, message, loaded, tiny, capsys):
    model = [] if "--model" in args else ["--model", tiny]
    assert message in refused(capsys, "--prompt", "a", *model, *args)
    assert loaded == []


def test_prompt_is_required(loaded, capsys):
    assert "--prompt" in refused(capsys)


@pytest.mark.parametrize(
    "content, message",
    [
        (b"\xff", "not JSON"),
        (b'{"a": ', "not JSON"),
        (b'{"type": "function"}', "expected a list"),
        (b"[1]", "tools[0] is no tool declaration"),
        (b"[" * 100_000, "nested too deeply"),
    ],
)
def test_wrong_tools_files(content, message, loaded, tmp_path, capsys):
    path = tmp_path / "tools.json"
    path.write_bytes(content)
    assert message in refused(capsys, "--prompt", "a", "--chat", "--tools", path)


# Failures: the checkpoint, mesh or prompt cannot be used.


def test_a_folder_without_a_checkpoint(tmp_path, capsys):
    message = failed(capsys, "--model", tmp_path, "--prompt", "a")
    assert "config.json: no such file" in message


def test_a_missing_shard(tiny, tmp_path, capsys):
    for path in tiny.iterdir():
        if path.suffix != ".safetensors":
            (tmp_path / path.name).symlink_to(path)
    assert "safetensors" in failed(capsys, "--model", tmp_path, "--prompt", "a")


def test_a_hub_id_without_the_hub(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert "the hub did not give it" in failed(capsys, "--model", "owner/name", "--prompt", "a")


@pytest.mark.parametrize(
    "args, message",
    [
        (["--mesh", "tensor=3"], "Meshes that work: tensor=1, tensor=2"),
        (["--mesh", "tensor=100000"], "needs 100000 devices"),
        (["--max-length", "1000"], "max_length is 1000, expected 2..256"),
        (["--platform", "gpu"], "no gpu device"),
    ],
)
def test_what_the_model_or_machine_does_not_fit(args, message, tiny, capsys):
    if "gpu" in args and generate.jax.default_backend() != "cpu":
        pytest.skip("there is a GPU")
    assert message in failed(capsys, "--model", tiny, "--prompt", "a", *args)


def test_a_prompt_that_is_too_long(loaded, tiny, capsys):
    assert "has 300 tokens" in failed(capsys, "--model", tiny, "--prompt", "\x01" * 300)


# Processes.


@pytest.mark.slow
def test_mesh_on_simulated_devices(script, tiny, llm):
    prompt = "def f(n):"
    out, before = script.json(
        *("generate.py", "--model", tiny, "--prompt", prompt, "--max-new-tokens", 12),
        *("--mesh", "expert=2,tensor=4"),
    )
    [expected] = llm.generate(prompt, SamplingParams(max_new_tokens=12))
    assert out["token_ids"] == list(expected.token_ids)
    assert before == f"{prompt}{expected.text}\n"
    assert out["compiles"] > 0
    assert out["conditions"]["mesh"] == {"expert": 2, "tensor": 4}
    assert out["conditions"]["device_count"] == 8
    assert out["conditions"]["model"] == str(tiny)


def test_demo_is_the_default(script):
    out, before = script.json("generate.py", "--prompt", "def fibonacci(n):")
    assert before == f"def fibonacci(n):{out['text']}\n"
    assert out["conditions"]["model"] == "demo"
    # It has a drafter of its own, and speculates with it.
    assert out["conditions"]["drafter"]["path_or_id"] == "demo" and out["tokens_per_cycle"] > 2
    assert out["finish_reason"] in ("stop", "length")
    # It has learnt to write source: the body of a function is indented and names things.
    assert "\n    " in out["text"] and "return" in out["text"]


@pytest.mark.slow
def test_a_closed_pipe_ends_quietly(script, tiny):
    options = ("--model", tiny, "--prompt", "a", "--max-new-tokens", 100)
    with script.start("generate.py", *options) as process:
        assert process.stdout.read(1) == "a"
        process.stdout.close()
        errors = process.stderr.read()
    assert process.returncode == 128 + signal.SIGPIPE
    assert "Traceback" not in errors and "Broken pipe" not in errors


def test_an_interrupt_ends_quietly(script, tiny):
    with script.start("generate.py", "--model", tiny, "--prompt", "a") as process:
        said = process.stderr.readline()
        assert "device" in said
        process.send_signal(signal.SIGINT)
        errors = process.stderr.read()
    assert process.returncode == -signal.SIGINT
    assert "Traceback" not in errors and "KeyboardInterrupt" not in errors
