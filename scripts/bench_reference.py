"""Speed of one stream against transformers on the same checkpoints, and the memory of loading.

    python scripts/bench_reference.py                     # demo and mini; about 6 minutes
    python scripts/bench_reference.py --models demo --repeats 3

What it measures, medians over the repeats: greedy decoding of one stream (tokens/s after the
prompt; of transformers' `generate`, the time for n tokens less the time for one), and prefill of
512 tokens. Each side lives in a process of its own and they take turns, so that a machine whose
speed drifts slows both; the ratio is the median of the turns' own ratios. transformers runs with
its defaults (sdpa attention, all cores); INT4 experts are unpacked for it, since on a CPU it has no
INT4 product. `mini` is a random checkpoint (make_random_checkpoint.py) in a temporary folder; its
transformers dtype is bfloat16, the demo's float32. Peak memory of loading is measured in processes
of their own, less what the imports, JAX's start and the tokenizer take.

Needs the extra `reference`. Prints a table, then one JSON line.
"""

import argparse
import json
import multiprocessing
import statistics
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from kimi_jax import DEMO, LLM, SamplingParams
from kimi_jax.runtime.conditions import conditions

PROMPT_TOKENS = 16
PREFILL_TOKENS = 512
TRANSFORMERS_DTYPE = {"demo": "float32", "mini": "bfloat16"}
NEW_TOKENS = {"demo": 128, "mini": 24}

_LOAD = """
import sys
from pathlib import Path

import jax.numpy as jnp
from kimi_jax import LLM
from kimi_jax.text.tokenizer import Tokenizer

def peak():
    # Not ru_maxrss, which a child takes over from its parent.
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))

jnp.zeros((8,)).block_until_ready()
tokenizer = Tokenizer.from_folder(Path(sys.argv[1]))
base = peak()
LLM(sys.argv[1], max_length=512, max_batch=1, progress=False)
print(base, peak())
"""


def loading_memory(folder: Path) -> dict[str, Any]:
    """Peak resident bytes that loading adds to what the process held, over the size on disk."""
    run = subprocess.run(
        [sys.executable, "-c", _LOAD, str(folder)], capture_output=True, text=True, check=True
    )
    base, peak = (int(word) * 1024 for word in run.stdout.split()[-2:])
    on_disk = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    return {
        "bytes_on_disk": on_disk,
        "bytes_before": base,
        "peak_bytes": peak,
        "loading_over_disk": round((peak - base) / on_disk, 3),
    }


class Ours:
    """This project, one stream."""

    def __init__(self, folder: Path, new_tokens: int):
        self._llm = LLM(folder, max_length=PREFILL_TOKENS + 256, max_batch=1, progress=False)
        self.dtype = self._llm.dtype
        self._new_tokens = new_tokens
        self._rng = np.random.default_rng(0)
        self.prefill()
        self.decode()

    def _prompt(self, length: int) -> list[int]:
        return self._rng.integers(0, self._llm.cfg.vocab_size // 2, length).tolist()

    def decode(self) -> float:
        """Seconds a token."""
        params = SamplingParams(max_new_tokens=self._new_tokens, ignore_eos=True)
        [result] = self._llm.generate([self._prompt(PROMPT_TOKENS)], params)
        return result.timings.decode_seconds / self._new_tokens

    def prefill(self) -> float:
        """Seconds for `PREFILL_TOKENS` tokens."""
        params = SamplingParams(max_new_tokens=1, ignore_eos=True)
        [result] = self._llm.generate([self._prompt(PREFILL_TOKENS + 1)], params)
        return result.timings.prefill_seconds


class Transformers:
    """transformers, the same checkpoint, experts unpacked."""

    def __init__(self, folder: Path, dtype: str, new_tokens: int):
        import make_goldens
        import torch
        import transformers

        transformers.utils.logging.set_verbosity_error()

        self._torch = torch
        self.dtype = dtype
        self._model = make_goldens.load_reference(folder, getattr(torch, dtype), attention="sdpa")
        self._vocab_size = self._model.config.get_text_config().vocab_size
        self._new_tokens = new_tokens
        self._rng = np.random.default_rng(0)
        self._generate(2)

    def _prompt(self, length: int) -> Any:
        return self._torch.tensor([self._rng.integers(0, self._vocab_size // 2, length).tolist()])

    def _generate(self, count: int) -> float:
        prompt = self._prompt(PROMPT_TOKENS)
        began = time.perf_counter()
        self._model.generate(
            prompt,
            attention_mask=self._torch.ones_like(prompt),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
        )
        return time.perf_counter() - began

    def decode(self) -> float:
        """Seconds a token."""
        return (self._generate(self._new_tokens) - self._generate(1)) / (self._new_tokens - 1)

    def prefill(self) -> float:
        """Seconds for `PREFILL_TOKENS` tokens."""
        prompt = self._prompt(PREFILL_TOKENS)
        began = time.perf_counter()
        with self._torch.no_grad():
            self._model(prompt, use_cache=True, logits_to_keep=1)
        return time.perf_counter() - began


class Worker:
    """One side in a process of its own; idle but while it measures."""

    def __init__(self, side: type, *args: Any):
        context = multiprocessing.get_context("spawn")
        self._pipe, end = context.Pipe()
        self._process = context.Process(target=_serve, args=(end, side, args), daemon=True)
        self._process.start()
        end.close()
        self.dtype: str = self._pipe.recv()

    def measure(self, phase: str) -> float:
        """Seconds for one unit of work: a token, or the whole prefill."""
        self._pipe.send(phase)
        return self._pipe.recv()

    def close(self) -> None:
        """Ends the process."""
        self._pipe.close()
        self._process.join()


def _serve(pipe: Connection, side_class: type, args: tuple) -> None:
    side = side_class(*args)
    pipe.send(side.dtype)
    while True:
        try:
            phase = pipe.recv()
        except EOFError:
            return
        pipe.send(getattr(side, phase)())


def take_turns(name: str, ours: Worker, theirs: Worker, phase: str, repeats: int) -> dict[str, Any]:
    """One row: each side once a turn, after one turn that is thrown away."""
    turns = []
    for _ in tqdm(range(repeats + 1), desc=f"{name} {phase}", disable=None, leave=False):
        turns.append((ours.measure(phase), theirs.measure(phase)))
    dtypes = {"ours_dtype": ours.dtype, "transformers_dtype": theirs.dtype}
    return {"model": name, "phase": phase, **compare(phase, turns[1:]), **dtypes}


def compare(phase: str, turns: list[tuple[float, float]]) -> dict[str, Any]:
    """Figures from each turn's seconds for one unit of work: this project's, transformers'."""
    tokens = PREFILL_TOKENS if phase == "prefill" else 1
    our_seconds, their_seconds = (statistics.median(side) for side in zip(*turns, strict=True))
    ratios = [theirs / ours for ours, theirs in turns]
    return {
        "ours_tokens_per_second": round(tokens / our_seconds, 2),
        "transformers_tokens_per_second": round(tokens / their_seconds, 2),
        "ratio": round(statistics.median(ratios), 2),
        "ratio_range": [round(min(ratios), 2), round(max(ratios), 2)],
        "repeats": len(turns),
    }


def main() -> None:
    """Runs everything; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="demo,mini", help="of demo, mini (default: both)")
    parser.add_argument("--mini", type=Path, help="an existing mini checkpoint (default: made)")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    models = args.models.split(",")
    if unknown := sorted(set(models) - set(TRANSFORMERS_DTYPE)):
        parser.error(f"--models {','.join(unknown)}: expected of demo, mini")
    if args.repeats < 1:
        parser.error("--repeats must be at least 1")
    try:
        import compressed_tensors
        import torch
        import transformers
    except ImportError as error:
        parser.exit(1, f'{error}; install it with: pip install -e ".[reference]"\n')
    from make_random_checkpoint import make_random_checkpoint

    rows: list[dict[str, Any]] = []
    memory: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name in models:
            folder = DEMO
            if name == "mini":
                folder = args.mini or Path(scratch) / "mini"
                if args.mini is None:
                    make_random_checkpoint(folder, "mini")
            memory[name] = loading_memory(folder)
            ours = Worker(Ours, folder, NEW_TOKENS[name])
            theirs = Worker(Transformers, folder, TRANSFORMERS_DTYPE[name], NEW_TOKENS[name])
            rows += [
                take_turns(name, ours, theirs, phase, args.repeats)
                for phase in ("decode", "prefill")
            ]
            ours.close()
            theirs.close()
    print(f"{'model':6} {'phase':8} {'ours tok/s':>11} {'transformers':>13} {'ratio':>7}")
    for row in rows:
        print(
            f"{row['model']:6} {row['phase']:8} {row['ours_tokens_per_second']:11.1f} "
            f"{row['transformers_tokens_per_second']:13.1f} {row['ratio']:7.2f}"
        )
    facts = conditions(
        torch=torch.__version__,
        torch_threads=torch.get_num_threads(),
        transformers=transformers.__version__,
        compressed_tensors=compressed_tensors.__version__,
        prompt_tokens=PROMPT_TOKENS,
        new_tokens=NEW_TOKENS,
        prefill_tokens=PREFILL_TOKENS,
        seed=0,
    )
    print(json.dumps({"rows": rows, "memory": memory, "conditions": facts}))


if __name__ == "__main__":
    main()
