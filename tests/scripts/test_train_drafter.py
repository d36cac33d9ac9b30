"""scripts/train_drafter.py: the whole path in small, and what it refuses before anything starts."""

import json

import numpy as np
import pytest
import train_drafter

from kimi_jax import DEMO
from spec.training.samples import Header, Sample, SamplesWriter


@pytest.mark.slow
def test_smoke(script):
    out, _ = script.json("train_drafter.py", "--smoke", "--quiet")
    assert out["steps"] == 6 and out["loss"] > 0 and out["text"]
    judged = out["evaluation"]
    assert judged["step"] == 6 and 1 <= judged["tokens_per_cycle"] <= 3
    # Greedy text and the same rows: what the text predicts is what decoding counts.
    assert judged["predicted_tokens_per_cycle"] == pytest.approx(
        judged["tokens_per_cycle"], abs=0.05
    )
    assert out["tokens_per_second"] > 0 and 0 < out["drafter_share"] < 1
    assert out["conditions"]["options"]["smoke"] is False


@pytest.fixture(scope="module")
def samples(tmp_path_factory):
    path = tmp_path_factory.mktemp("samples") / "a.jsonl"
    ids = np.arange(40, dtype=np.int32)
    with SamplesWriter(path, Header.of(DEMO, 4096)) as writer:
        writer.append(Sample(id="a", input_ids=ids, loss_mask=ids > 3))
    return path


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ("--out o", "either --data or --states"),
        ("--data nowhere.jsonl --out o", "nowhere.jsonl: no such file"),
        ("--data SAMPLES", "--out is missing"),
        ("--data SAMPLES --out o --length 300", "a multiple of 512"),
        ("--data SAMPLES --out o --rows 0", "--rows is 0"),
        ("--data SAMPLES --out o --draft-tokens 2", "only with --held-out: --draft-tokens"),
        (
            "--data SAMPLES --out o --held-out SAMPLES --draft-tokens 9",
            "trained are --draft-steps 7",
        ),
        ("--data SAMPLES --out o --seed -1", "--seed is -1"),
        ("--smoke --steps 3", "has its own options"),
        ("--data SAMPLES --out SAMPLES", "is a file"),
        ("--data SAMPLES --out o --learning-rate nan", "--learning-rate is nan"),
        ("--data SAMPLES --out o --taps 2,x", "--taps is '2,x'"),
        ("--data SAMPLES --out o --taps 2,9", "outside the target's 5 layers"),
        ("--data SAMPLES --out o --draft-vocab-size 5000", "more than the vocab_size"),
        ("--data SAMPLES --out o --draft-vocab-size 2", "vocabulary's size is 2"),
        ("--data SAMPLES --out o --warm-start d --kind mla", "only without --warm-start: --kind"),
        ("--data SAMPLES --out d --warm-start d", "--out is --warm-start's folder"),
        ("--data SAMPLES --out o --warm-start nowhere/at/all", "nowhere/at/all"),
        ("--data SAMPLES --out o --held-out SAMPLES", "1 samples are trained on, 'a' is one"),
        ("--data SAMPLES --out o --length 32", "no sample is left"),
        ("--data SAMPLES --states s --out o", "either --data or --states"),
    ],
)
def test_bad_options_are_refused_before_the_target_is_loaded(
    samples, tmp_path, monkeypatch, capsys, options, problem
):
    monkeypatch.chdir(tmp_path)

    def never(*_args, **_options):
        raise AssertionError("the target was loaded")

    monkeypatch.setattr(train_drafter, "LLM", never)
    words = [str(samples) if word == "SAMPLES" else word for word in options.split()]
    assert train_drafter.main(words) == 1
    assert problem in capsys.readouterr().err
    assert not (tmp_path / "o").exists()


def test_samples_of_another_target_are_refused(samples, tmp_path, capsys):
    first, rest = samples.read_text().split("\n", 1)
    header = json.loads(first)
    header["tokenizer_sha256"] = "0" * 64
    other = tmp_path / "other.jsonl"
    other.write_text(json.dumps(header) + "\n" + rest)
    assert train_drafter.main(["--data", str(other), "--out", str(tmp_path / "o")]) == 1
    assert "made for another target: tokenizer_sha256" in capsys.readouterr().err
