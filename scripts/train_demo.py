"""Trains the bundled demo model from the running interpreter's standard library.

    python scripts/train_demo.py --out kimi_jax/demo           about 60 minutes on two cores
    python scripts/train_demo.py --out OUT --smoke           under a minute, a toy of the same kind

What it does: trains a byte-level vocabulary with the published split pattern, trains the model
through `kimi_jax.model` with INT4 fake quantisation of the routed experts and the bias-balanced
router of DeepSeek-V3, and writes a checkpoint in the published Kimi-K2.5 layout with its held-out
loss. A tenth of the samples are chat turns (a docstring asked for, its function answered), so that
the chat template's control tokens mean something to it.

Resumable: `--work` holds orbax checkpoints, a killed run goes on from the newest. `--steps` may be
changed on resuming; the learning rate is constant and falls to zero over the last 40 % of steps.
Ends with one JSON line. Needs the extra `train`.
"""

import argparse
import ast
import dataclasses
import functools
import hashlib
import json
import platform
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from tqdm import tqdm

from kernels_pallas.grouped_matmul.layout import pack_kernel
from kimi_jax import LLM
from kimi_jax.axes import pytree_dataclass
from kimi_jax.checkpoint.writer import export_params, write_checkpoint
from kimi_jax.config import PUBLISHED_IGNORE, ModelConfig, QuantizationConfig, RopeConfig
from kimi_jax.model.quant import fake_quantize, quantize_int4
from kimi_jax.model.transformer import Kimi, forward, logits
from kimi_jax.text.chat import ChatTemplate
from kimi_jax.text.tokenizer import (
    NUM_SPECIAL_SLOTS,
    SPLIT_PATTERN,
    Tokenizer,
    published_tokenizer_config,
    write_tiktoken_model,
)

TEMPLATE = Path(__file__).resolve().parent.parent / "kimi_jax" / "demo" / "chat_template.jinja"
BIAS_STEP = 3e-3
EXPERT_MATRICES = ("gate_proj", "up_proj", "down_proj")


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Sizes of the model and of the run."""

    cfg: ModelConfig
    batch: int
    context: int
    steps: int
    learning_rate: float = 2e-3
    warmup: int = 60
    decay_share: float = 0.4
    weight_decay: float = 0.1
    max_files: int | None = None


def demo_config(vocab_size: int = 4096) -> ModelConfig:
    """The demo: the published architecture, 16.9 M parameters, 15.6 MB with INT4 experts."""
    ranks = vocab_size - NUM_SPECIAL_SLOTS
    return ModelConfig(
        vocab_size=vocab_size,
        hidden_size=256,
        num_hidden_layers=5,
        first_k_dense_replace=1,
        intermediate_size=512,
        moe_intermediate_size=256,
        n_routed_experts=16,
        n_shared_experts=1,
        num_experts_per_tok=4,
        num_attention_heads=8,
        q_lora_rank=128,
        kv_lora_rank=64,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        max_position_embeddings=2048,
        rope=RopeConfig(
            theta=50000.0,
            factor=4.0,
            mscale_all_dim=1.0,
            original_max_position_embeddings=512,
        ),
        routed_scaling_factor=2.0,
        bos_token_id=ranks,
        eos_token_id=(ranks + 1,),
        pad_token_id=ranks + 255,
    )


FULL = Recipe(cfg=demo_config(), batch=4, context=512, steps=2400)
SMOKE = Recipe(
    cfg=dataclasses.replace(
        demo_config(768),
        hidden_size=64,
        num_hidden_layers=2,
        intermediate_size=128,
        moe_intermediate_size=64,
        n_routed_experts=8,
        num_experts_per_tok=2,
    ),
    batch=4,
    context=64,
    steps=12,
    warmup=4,
    max_files=12,
)


def library_files() -> tuple[list[Path], list[Path]]:
    """Training and held-out modules of the standard library; about one in 25 is held out.

    Which, a hash of the module's path decides, so that it does not change between versions.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    left_out = {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"}
    paths = [
        path
        for path in sorted(root.rglob("*.py"))
        if not left_out & set(path.relative_to(root).parts)
    ]
    held_out = [p for p in paths if _is_held_out(p.relative_to(root).as_posix())]
    return [p for p in paths if p not in set(held_out)], held_out


def _is_held_out(name: str) -> bool:
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % 25 == 0


def read_sources(paths: list[Path]) -> list[str]:
    """Their text; the few files that are not UTF-8 are left out."""
    texts = []
    for path in paths:
        try:
            texts.append(path.read_text(encoding="utf-8"))
        except UnicodeDecodeError:
            continue
    return texts


def train_vocabulary(texts: list[str], size: int) -> dict[bytes, int]:
    """Byte-pair merges over the published split pattern: token bytes to rank, bytes first."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=alphabet, show_progress=False, special_tokens=[]
    )
    bpe.train_from_iterator(texts, trainer)
    by_id = sorted(bpe.get_vocab().items(), key=lambda item: item[1])
    byte_of = _byte_level_alphabet()
    tokens = [bytes(byte_of[char] for char in token) for token, _ in by_id]
    if len(tokens) != size:
        raise SystemExit(f"the corpus gives {len(tokens)} tokens, {size} are wanted: use more text")
    return {token: rank for rank, token in enumerate(tokens)}


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for every byte: itself where printable, else 256 and up."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


def chat_samples(texts: list[str]) -> Iterator[list[dict[str, str]]]:
    """One turn per documented function: its first docstring line asked, its source answered."""
    for text in texts:
        try:
            tree = ast.parse(text)
        except SyntaxError:
            continue
        for node in ast.walk(tree):
            doc = ast.get_docstring(node) if isinstance(node, ast.FunctionDef) else None
            source = ast.get_source_segment(text, node) if doc else None
            if doc and source and len(source) < 1500:
                ask = f"Write the function {node.name}: {doc.splitlines()[0]}"
                yield [{"role": "user", "content": ask}, {"role": "assistant", "content": source}]


def token_streams(
    tokenizer: Tokenizer, template: ChatTemplate, texts: list[str], max_chats: int
) -> tuple[np.ndarray, np.ndarray]:
    """Source files and chat turns as two long rows of ids, every document closed by its end."""
    end = tokenizer.special_id("[EOS]")
    code: list[int] = []
    for text in texts:
        code += [*tokenizer.encode(text), end]
    chats: list[int] = []
    for i, messages in enumerate(chat_samples(texts)):
        if i == max_chats:
            break
        chats += [*template.render(messages, add_generation_prompt=False), end]
    return np.asarray(code, np.int32), np.asarray(chats, np.int32)


def sample_batch(
    code: np.ndarray, chats: np.ndarray, recipe: Recipe, step: int, seed: int
) -> np.ndarray:
    """Windows of context + 1 ids; a function of the step alone, so that resuming repeats it."""
    rng = np.random.default_rng((seed, step))
    rows = []
    for _ in range(recipe.batch):
        source = chats if rng.random() < 0.1 and len(chats) > recipe.context + 1 else code
        start = rng.integers(0, len(source) - recipe.context - 1)
        rows.append(source[start : start + recipe.context + 1])
    return np.stack(rows)


@pytree_dataclass
class TrainState:
    """Everything a resumed run needs."""

    weights: nnx.State
    optimizer: optax.OptState
    step: jax.Array


def learning_rate(step: int, recipe: Recipe) -> float:
    """Linear warm-up, constant, linear fall to zero over the last `decay_share` of steps."""
    rise = min(1.0, (step + 1) / recipe.warmup)
    fall = min(1.0, (recipe.steps - step) / max(1.0, recipe.steps * recipe.decay_share))
    return recipe.learning_rate * rise * fall


def make_optimizer(recipe: Recipe) -> optax.GradientTransformation:
    """AdamW on matrices, no decay on gains; the router's bias is moved by the load alone."""
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.scale_by_adam(b1=0.9, b2=0.95, eps=1e-8),
        optax.add_decayed_weights(
            recipe.weight_decay, mask=lambda p: jax.tree.map(lambda x: x.ndim > 1, p)
        ),
    )


def with_fake_quantisation(model: Kimi) -> None:
    """Replaces the routed experts' weights by the values their INT4 form will have, in place."""
    for block in model.layers:
        if hasattr(block.mlp, "experts"):
            for name in EXPERT_MATRICES:
                param = getattr(block.mlp.experts, name)
                param[...] = fake_quantize(param[...])


def cross_entropy(model: Kimi, batch: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Mean loss in nats a token, and each MoE layer's load: pairs every expert received."""
    B, T = batch.shape[0], batch.shape[1] - 1
    positions = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))
    out = forward(model, batch[:, :-1], positions)
    logits_f32 = logits(model, out.hidden)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits_f32, batch[:, 1:])
    E = model.cfg.n_routed_experts
    loads = tuple(
        jnp.zeros((E,), jnp.int32).at[routing.expert_ids.reshape(-1)].add(1)
        for routing in out.routing
    )
    return jnp.mean(losses), loads


@functools.partial(jax.jit, static_argnames=("graph", "recipe"), donate_argnames="state")
def train_step(
    state: TrainState, batch: jax.Array, rate: jax.Array, *, graph: nnx.GraphDef, recipe: Recipe
) -> tuple[TrainState, jax.Array, jax.Array]:
    """One update; returns the loss and the largest expert load over the mean load."""

    def loss_of(weights: nnx.State):
        model = nnx.merge(graph, weights)
        with_fake_quantisation(model)
        return cross_entropy(model, batch)

    (loss, loads), grads = jax.value_and_grad(loss_of, has_aux=True)(state.weights)
    updates, optimizer = make_optimizer(recipe).update(grads, state.optimizer, state.weights)
    weights = optax.apply_updates(state.weights, jax.tree.map(lambda u: -rate * u, updates))
    model = nnx.merge(graph, weights)
    moe_blocks = [block for block in model.layers if hasattr(block.mlp, "experts")]
    for block, load in zip(moe_blocks, loads, strict=True):
        # Auxiliary-loss-free balancing (arXiv 2408.15664): a step against the sign of the excess.
        excess = load.astype(jnp.float32) - jnp.mean(load.astype(jnp.float32))
        bias = block.mlp.e_score_correction_bias
        bias[...] = bias[...] - BIAS_STEP * jnp.sign(excess)
    worst = jnp.max(jnp.stack([jnp.max(load) / jnp.mean(load) for load in loads]))
    return (
        TrainState(weights=nnx.state(model), optimizer=optimizer, step=state.step + 1),
        loss,
        worst,
    )


def damp_outputs(model: Kimi) -> None:
    """Scales what each sublayer adds by (2 L)^-1/2, so that the stream stays of order one."""
    factor = (2 * model.cfg.num_hidden_layers) ** -0.5
    for path, param in nnx.to_flat_state(nnx.state(model)):
        if path[-1] in ("o_proj", "down_proj"):
            param[...] = param[...] * factor


def train(recipe: Recipe, code: np.ndarray, chats: np.ndarray, work: Path, seed: int):
    """The trained weights, the graph, and the loss by step; resumes from the newest checkpoint."""
    model = Kimi(recipe.cfg, dtype=jnp.float32, rngs=nnx.Rngs(seed))
    damp_outputs(model)
    graph, weights = nnx.split(model)
    state = TrainState(
        weights=weights,
        optimizer=make_optimizer(recipe).init(weights),
        step=jnp.zeros((), jnp.int32),
    )
    del model, weights
    log = work / "log.jsonl"
    options = ocp.CheckpointManagerOptions(max_to_keep=2, save_interval_steps=100)
    with ocp.CheckpointManager(work / "steps", options=options) as manager:
        if manager.latest_step() is not None:
            leaves, structure = jax.tree.flatten(state)
            restored = manager.restore(
                manager.latest_step(), args=ocp.args.StandardRestore(dict(leaves=leaves))
            )
            state = jax.tree.unflatten(structure, restored["leaves"])
        first = int(state.step)
        began = time.monotonic()
        bar = tqdm(
            range(first, recipe.steps), initial=first, total=recipe.steps, disable=None, unit="step"
        )
        for step in bar:
            batch = jnp.asarray(sample_batch(code, chats, recipe, step, seed))
            rate = jnp.float32(learning_rate(step, recipe))
            state, loss, worst = train_step(state, batch, rate, graph=graph, recipe=recipe)
            if step % 10 == 9 or step + 1 == recipe.steps:
                loss = float(loss)
                if not np.isfinite(loss):
                    raise SystemExit(f"the loss is {loss} at step {step}; checkpoints in {work}")
                row = {
                    "step": step + 1,
                    "loss": round(loss, 4),
                    "largest_over_mean_load": round(float(worst), 2),
                    "learning_rate": float(rate),
                    "seconds": round(time.monotonic() - began, 1),
                }
                with log.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                bar.set_postfix(loss=row["loss"])
            leaves = jax.tree.leaves(state)
            manager.save(step + 1, args=ocp.args.StandardSave(dict(leaves=leaves)))
        if recipe.steps > first and manager.latest_step() != recipe.steps:
            leaves = jax.tree.leaves(state)
            args = ocp.args.StandardSave(dict(leaves=leaves))
            manager.save(recipe.steps, args=args, force=True)
        manager.wait_until_finished()
    return nnx.merge(graph, state.weights)


def held_out_loss(folder: Path, ids: np.ndarray, recipe: Recipe, max_windows: int) -> float:
    """Mean loss of the written checkpoint over consecutive windows of the training context."""
    llm = LLM(folder, dtype="float32", max_length=recipe.context, max_batch=1, progress=False)
    windows = ids[: len(ids) // recipe.context * recipe.context].reshape(-1, recipe.context)
    bar = tqdm(windows[:max_windows], desc="held out", disable=None)
    return float(-np.mean([llm.score([window.tolist()])[0] for window in bar]))


def quantised_params(model: Kimi) -> dict[str, jax.Array]:
    """Parameters by path, the routed experts as packed INT4, the rest bfloat16."""
    params: dict[str, jax.Array] = {}
    for path, param in nnx.to_flat_state(nnx.state(model)):
        name = ".".join(map(str, path))
        value = param[...]
        if ".experts." in name:
            q, scale = quantize_int4(value)
            params[f"{name}.packed"] = pack_kernel(q)
            params[f"{name}.scale"] = scale
        else:
            is_bias = name.endswith("e_score_correction_bias")
            params[name] = value if is_bias else value.astype(jnp.bfloat16)
    return params


def write_demo(model: Kimi, ranks: dict[bytes, int], out: Path) -> None:
    """The checkpoint folder, in the layout and spelling of Kimi-K2.5."""
    cfg = dataclasses.replace(model.cfg, quantization=QuantizationConfig(ignore=PUBLISHED_IGNORE))
    tensors = export_params(quantised_params(model), cfg, prefix="language_model.")
    write_checkpoint(out, tensors, cfg.to_kimi_k25_dict(), overwrite=True)
    config = published_tokenizer_config(len(ranks))
    write_tiktoken_model(out / "tiktoken.model", ranks)
    _write_json(out / "tokenizer_config.json", config)
    end_of_turn = Tokenizer(ranks, config).special_id("<|im_end|>")
    _write_json(out / "generation_config.json", {"eos_token_id": end_of_turn})
    target = out / TEMPLATE.name
    if target.resolve() != TEMPLATE:
        target.write_text(TEMPLATE.read_text(encoding="utf-8"), encoding="utf-8")


def write_readme(out: Path, facts: dict, held_out: list[Path]) -> None:
    """What the model is, how it was made, and what it must not be judged on."""
    root = Path(sysconfig.get_paths()["stdlib"])
    names = "\n".join(f"- {path.relative_to(root).as_posix()}" for path in held_out)
    rows = "\n".join(f"| {key.replace('_', ' ')} | {value} |" for key, value in facts.items())
    (out / "README.md").write_text(
        f"""# The demo model

A small model of Kimi-K2.5's architecture and file layout: MLA attention, sigmoid router, INT4
group-32 experts, the published tokenizer pattern. It completes Python source in the manner of the
standard library and is meant for tests and first steps, not for use.

Made from the standard library of the Python that ran it (PSF licence), with INT4 fake quantisation
of the routed experts, by

    python scripts/train_demo.py --out kimi_jax/demo --steps {facts["steps"]}

| | |
| --- | --- |
{rows}

The held-out loss is in nats a token, over the modules below, of the written (INT4 and bfloat16)
weights. Modules never trained on:

{names}
""",
        encoding="utf-8",
    )


def _write_json(path: Path, data: dict) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def main(argv: list[str] | None = None) -> None:
    """Runs everything; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the written checkpoint")
    parser.add_argument("--work", type=Path, help="checkpoints and log (default: OUT.work)")
    parser.add_argument("--steps", type=int, help="optimizer steps (default: the recipe's)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--smoke", action="store_true", help="a toy model, a few steps")
    args = parser.parse_args(argv)
    recipe = SMOKE if args.smoke else FULL
    if args.steps is not None:
        if args.steps < 1:
            parser.error("--steps must be at least 1")
        recipe = dataclasses.replace(recipe, steps=args.steps)
    work = (args.work or args.out.with_name(args.out.name + ".work")).absolute()
    work.mkdir(parents=True, exist_ok=True)
    args.out.mkdir(parents=True, exist_ok=True)

    began = time.monotonic()
    train_paths, held_out_paths = library_files()
    texts = read_sources(train_paths[: recipe.max_files])
    held_out = read_sources(held_out_paths[: recipe.max_files])
    ranks = train_vocabulary(texts, recipe.cfg.vocab_size - NUM_SPECIAL_SLOTS)
    tokenizer = Tokenizer(ranks)
    template = ChatTemplate(TEMPLATE.read_text(encoding="utf-8"), tokenizer)
    code, chats = token_streams(tokenizer, template, texts, 40 if args.smoke else 8000)
    held_out_ids, _ = token_streams(tokenizer, template, held_out, 0)
    print(
        f"{len(texts)} files, {len(code)} tokens of source, {len(chats)} of chat, "
        f"{sum(map(len, map(str.encode, texts))) / len(code):.2f} bytes a token",
        file=sys.stderr,
    )
    model = train(recipe, code, chats, work, args.seed)
    train_seconds = time.monotonic() - began
    write_demo(model, ranks, args.out)
    loss = held_out_loss(args.out, held_out_ids, recipe, 4 if args.smoke else 240)
    held_out_bytes = sum(map(len, map(str.encode, held_out)))
    facts = {
        "parameters": sum(x.size for x in jax.tree.leaves(nnx.state(model))),
        "bytes": sum(p.stat().st_size for p in args.out.glob("*.safetensors")),
        "held_out_loss": round(loss, 4),
        "held_out_bits_per_byte": round(
            loss / np.log(2) * len(held_out_ids) / max(1, held_out_bytes), 4
        ),
        "steps": recipe.steps,
        "tokens_trained": recipe.steps * recipe.batch * recipe.context,
        "context": recipe.context,
        "seed": args.seed,
        "python": platform.python_version(),
        "jax": jax.__version__,
    }
    write_readme(args.out, facts, held_out_paths[: recipe.max_files])
    print(json.dumps({"out": str(args.out), **facts, "seconds": round(train_seconds, 1)}))


if __name__ == "__main__":
    main()
