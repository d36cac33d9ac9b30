"""Published EAGLE-3 weights, read strictly and written back.

Compares every tensor of a drafter's folder with its configuration, in the letters of
`kimi_jax.axes` as the target's table does, and gives parameters by the paths of
`spec.eagle3.model.Eagle3`. A drafter without its own embedding or head borrows the target's.
The map of a reduced vocabulary, published as offsets (`d2t`), is kept as target ids. It knows
nothing of devices or of the model's code.
"""

import dataclasses
import functools
import logging
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kimi_jax.checkpoint import table
from kimi_jax.checkpoint.load import copy_converted
from kimi_jax.checkpoint.reader import DTYPES, CheckpointError, CheckpointFiles, summarise
from kimi_jax.checkpoint.table import FLOATS, IGNORED_SUFFIXES, Parameter
from kimi_jax.checkpoint.writer import LazyTensor, write_checkpoint
from kimi_jax.config import ModelConfig
from spec.eagle3.config import DrafterConfig, DrafterError

MAP = "draft_to_target"
"""The path of the map from draft ids to target ids, int32 [W]."""

LAYER_PREFIXES = ("midlayer.", "layers.0.")
"""The published spellings: of SafeAILab and SpecForge, of vLLM, speculators and TorchSpec."""

# Parameter, its axes; published tensor, its axes as stored. Beside the letters of the project:
# DD is the embedding and the feature side by side, X all tapped streams side by side, Y one of
# them, P the key-value heads.
_LAYER = LAYER_PREFIXES[0]
_NORMS = (
    ("input_layernorm", "D", f"{_LAYER}input_layernorm.weight", "D"),
    ("hidden_norm", "D", f"{_LAYER}hidden_norm.weight", "D"),
    ("post_attention_layernorm", "D", f"{_LAYER}post_attention_layernorm.weight", "D"),
    ("norm", "D", "norm.weight", "D"),
)
_LLAMA = (
    ("self_attn.q_proj", "DD N H", f"{_LAYER}self_attn.q_proj.weight", "(N H) DD"),
    ("self_attn.k_proj", "DD P H", f"{_LAYER}self_attn.k_proj.weight", "(P H) DD"),
    ("self_attn.v_proj", "DD P H", f"{_LAYER}self_attn.v_proj.weight", "(P H) DD"),
    ("self_attn.o_proj", "N H D", f"{_LAYER}self_attn.o_proj.weight", "D (N H)"),
)
_MLA = (
    ("self_attn.q_a_proj", "DD Q", f"{_LAYER}self_attn.q_a_proj.weight", "Q DD"),
    ("self_attn.q_a_layernorm", "Q", f"{_LAYER}self_attn.q_a_layernorm.weight", "Q"),
    ("self_attn.q_b_proj", "Q N UR", f"{_LAYER}self_attn.q_b_proj.weight", "(N UR) Q"),
    (
        "self_attn.kv_a_proj_with_mqa",
        "DD CR",
        f"{_LAYER}self_attn.kv_a_proj_with_mqa.weight",
        "CR DD",
    ),
    ("self_attn.kv_a_layernorm", "C", f"{_LAYER}self_attn.kv_a_layernorm.weight", "C"),
    ("self_attn.kv_b_proj_k", "N U C", f"{_LAYER}self_attn.kv_b_proj.weight", "(N UH) C"),
    ("self_attn.kv_b_proj_v", "N C H", f"{_LAYER}self_attn.kv_b_proj.weight", "(N UH) C"),
    ("self_attn.o_proj", "N H D", f"{_LAYER}self_attn.o_proj.weight", "D (N H)"),
)
_MLP = (
    ("mlp.gate_proj", "D F", f"{_LAYER}mlp.gate_proj.weight", "F D"),
    ("mlp.up_proj", "D F", f"{_LAYER}mlp.up_proj.weight", "F D"),
    ("mlp.down_proj", "F D", f"{_LAYER}mlp.down_proj.weight", "D F"),
)
_EMBEDDING = "embed_tokens.weight"
_HEAD = "lm_head.weight"
_MAP_DTYPES = {"d2t": ("I64", "I32"), "t2d": ("BOOL", "U8")}
_OF_A_TARGET = re.compile(
    r"language_model\.|vision_tower\.|(model\.)?layers\.(\d+\.mlp\.experts\.|[1-9])"
)
_OF_QUANTISED = re.compile(r".*\.weight_(packed|scale|scale_inv|zero_point|shape)|.*\.input_scale")

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrafterFiles:
    """A drafter's folder that fits its configuration; nothing of the weights has been read.

    Without `has_own_embedding` or `has_own_head` the target's serve; without `has_map` draft ids
    are target ids. `file_names` gives the name in the files of each published name.
    """

    cfg: DrafterConfig
    files: CheckpointFiles
    parameters: dict[str, Parameter]
    file_names: dict[str, str]
    has_own_embedding: bool
    has_own_head: bool
    has_map: bool

    def paths(self) -> dict[str, tuple[int, ...]]:
        """The shape of every parameter the files give, the map's included."""
        out = {path: row.shape for path, row in self.parameters.items()}
        return out | ({MAP: (self.cfg.draft_vocab_size,)} if self.has_map else {})

    def read(self, path: str) -> np.ndarray:
        """A parameter in its stored dtype (the map in int32), in fresh memory."""
        if path == MAP and self.has_map:
            return _to_target_ids(self.files.read(self.file_names["d2t"])).astype(np.int32)
        row = self.parameters[path]
        name = self.file_names[row.name]
        out = np.empty(row.shape, DTYPES[self.files.tensors[name].dtype])
        whole = (slice(None),) * len(row.shape)
        copy_converted(
            out, row.view(lambda i: self.files.read(name, i, shape=row.split_shape), whole)
        )
        return out


def parameters(
    cfg: DrafterConfig, *, has_own_embedding: bool, has_own_head: bool
) -> dict[str, Parameter]:
    """Every parameter of the drafter by path, the map aside; names as with `midlayer.`."""
    rows: list[tuple[str, str, str, str]] = []
    if has_own_embedding:
        rows.append(("embed_tokens", "V D", _EMBEDDING, "V D"))
    if cfg.use_aux_hidden_state:
        rows.append(("fc", "X D", "fc.weight", "D X"))
    if cfg.fc_norm:
        rows += [(f"fc_norm.{z}", "Y", f"fc_norm.{z}.weight", "Y") for z in range(len(cfg.taps))]
    if cfg.norm_before_fc:
        rows.append(("input_norm", "X", "input_norm.weight", "X"))
    rows += [*_NORMS, *(_LLAMA if cfg.mla is None else _MLA), *_MLP]
    if has_own_head:
        rows.append(("lm_head", "D W", _HEAD, "W D"))
    sizes = _sizes(cfg)
    return {row[0]: table.parameter(*row, sizes) for row in rows}


def open_drafter(folder: str | os.PathLike[str], cfg: DrafterConfig) -> DrafterFiles:
    """Compares a drafter's folder with its configuration: names, shapes, dtypes and the map.

    The layer may be called `midlayer.` or `layers.0.`, and `model.` may come before any name.
    `t2d`, which only training uses, must agree with `d2t` where it is there.

    Raises:
        DrafterError: names everything that does not fit.
    """
    files = _open(folder)
    found, problems = _published_names(files)
    quantised = [name for name in found.values() if _OF_QUANTISED.fullmatch(name)]
    if quantised:
        problems.append(f"quantised drafters are not supported: {summarise(quantised)}")
        raise DrafterError(files.folder, problems)
    has_own_embedding, has_own_head = _EMBEDDING in found, _HEAD in found
    rows = parameters(cfg, has_own_embedding=has_own_embedding, has_own_head=has_own_head)
    wanted = {row.name: row.published_shape for row in rows.values()}
    problems += _check_borrowed(cfg, has_own_embedding, has_own_head)
    prefix = LAYER_PREFIXES[any(LAYER_PREFIXES[1] in name for name in found.values())]
    missing = [name.replace(_LAYER, prefix) for name in wanted if name not in found]
    if missing:
        problems.append(f"missing: {summarise(missing)}")
    problems += _explain_extra(cfg, {n: found[n] for n in found if n not in wanted})
    wanted |= {"d2t": (cfg.draft_vocab_size,), "t2d": (cfg.vocab_size,)}
    problems += _check_tensors(files, found, wanted)
    problems += _check_map(cfg, files, found)
    if problems:
        raise DrafterError(files.folder, problems)
    if not has_own_embedding:
        _log.info("%s: no embed_tokens; the drafter uses the target's embedding", files.folder)
    if not has_own_head:
        _log.warning("%s: no lm_head; the drafter uses the target's head", files.folder)
    return DrafterFiles(
        cfg=cfg,
        files=files,
        parameters=rows,
        file_names=found,
        has_own_embedding=has_own_embedding,
        has_own_head=has_own_head,
        # Ascending ids that fill the vocabulary are the ids themselves.
        has_map=cfg.draft_vocab_size < cfg.vocab_size,
    )


def check_target(cfg: DrafterConfig, target: ModelConfig) -> None:
    """Refuses a drafter that was not made for a target of these sizes.

    Raises:
        DrafterError: names every size that differs and the taps outside the target.
    """
    problems = []
    if cfg.vocab_size != target.vocab_size:
        problems.append(f"vocab_size is {cfg.vocab_size}, the target's is {target.vocab_size}")
    if cfg.target_hidden_size != target.hidden_size:
        problems.append(
            f"the drafter reads hidden states of width {cfg.target_hidden_size}, "
            f"the target's hidden_size is {target.hidden_size}"
        )
    outside = [tap for tap in cfg.taps if not 0 <= tap <= target.num_hidden_layers]
    if outside:
        problems.append(f"taps {outside}: the target has {target.num_hidden_layers} layers")
    if problems:
        raise DrafterError("the drafter is of another target", problems)


def write_drafter(
    folder: str | os.PathLike[str],
    cfg: DrafterConfig,
    arrays: Mapping[str, np.ndarray],
    *,
    layer_prefix: str = "midlayer.",
    overwrite: bool = False,
) -> Path:
    """The folder, with the parameters as `open_drafter` reads them and `config.json`.

    Args:
        folder: made when it does not exist.
        cfg: of the drafter.
        arrays: by path, each in the dtype it is to be stored in; `embed_tokens` and `lm_head` may
            be left out where the target's can serve.
        layer_prefix: one of `LAYER_PREFIXES`.
        overwrite: replaces the weights a folder already holds.

    Raises:
        DrafterError: what `open_drafter` would refuse: parameters missing, unknown, mis-shaped or
            of another dtype, or a bad map; or taps that have no published spelling.
        ValueError: an unknown `layer_prefix`.
        FileExistsError: the folder holds weights and `overwrite` is off.
    """
    if layer_prefix not in LAYER_PREFIXES:
        raise ValueError(f"layer_prefix is {layer_prefix!r}, published: {LAYER_PREFIXES}")
    owns = {"has_own_embedding": "embed_tokens" in arrays, "has_own_head": "lm_head" in arrays}
    rows = parameters(cfg, **owns)
    has_map = cfg.draft_vocab_size < cfg.vocab_size
    shapes = {path: row.shape for path, row in rows.items()}
    shapes |= {MAP: (cfg.draft_vocab_size,)} if has_map else {}
    problems = _check_borrowed(cfg, *owns.values())
    for verb, paths in (
        ("missing", shapes.keys() - arrays.keys()),
        ("not part of this drafter", arrays.keys() - shapes.keys()),
    ):
        if paths:
            problems.append(f"{verb}: {summarise(sorted(paths))}")
    problems += [
        f"shape: {path} {list(arrays[path].shape)}, expected {list(shape)}"
        for path, shape in shapes.items()
        if path in arrays and arrays[path].shape != shape
    ]
    floats = [DTYPES[name] for name in FLOATS]
    problems += [
        f"dtype: {path} is {arrays[path].dtype}, supported: {', '.join(map(str, floats))}"
        for path in rows
        if path in arrays and arrays[path].dtype not in floats
    ]
    if has_map and not problems:
        problems += _map_problems(arrays[MAP], cfg)
    if problems:
        raise DrafterError(Path(folder), problems)
    config = cfg.to_dict() | {"dtype": str(arrays["norm"].dtype)}
    tensors = _published(cfg, rows, arrays, layer_prefix)
    return write_checkpoint(folder, tensors, config, overwrite=overwrite)


def _published(
    cfg: DrafterConfig,
    rows: dict[str, Parameter],
    arrays: Mapping[str, np.ndarray],
    layer_prefix: str,
) -> Iterator[tuple[str, np.ndarray | LazyTensor]]:
    groups: dict[str, list[Parameter]] = {}
    for row in rows.values():
        groups.setdefault(row.name, []).append(row)

    def make(group: list[Parameter]) -> np.ndarray:
        out = np.empty(group[0].split_shape, arrays[group[0].path].dtype)
        for row in group:
            # The same view that reading goes through, written to.
            whole = (slice(None),) * len(row.shape)
            copy_converted(row.view(out.__getitem__, whole), arrays[row.path])
        return out.reshape(group[0].published_shape)

    for name, group in groups.items():
        dtype = np.dtype(arrays[group[0].path].dtype)
        tensor = LazyTensor(group[0].published_shape, dtype, functools.partial(make, group))
        yield name.replace(_LAYER, layer_prefix), tensor
    if MAP in arrays:
        ids = arrays[MAP].astype(np.int64)
        yield "d2t", ids - np.arange(len(ids))
        yield "t2d", _mask(ids, cfg.vocab_size)


def _sizes(cfg: DrafterConfig) -> dict[str, int]:
    out = {
        "V": cfg.vocab_size,
        "W": cfg.draft_vocab_size,
        "D": cfg.hidden_size,
        "F": cfg.intermediate_size,
        "N": cfg.num_attention_heads,
        "P": cfg.num_key_value_heads,
        "H": cfg.head_dim,
        "X": len(cfg.taps) * cfg.target_hidden_size,
        "Y": cfg.target_hidden_size,
    }
    if cfg.mla is not None:
        out |= {
            "Q": cfg.mla.q_lora_rank,
            "C": cfg.mla.kv_lora_rank,
            "U": cfg.mla.qk_nope_head_dim,
            "R": cfg.mla.qk_rope_head_dim,
            "H": cfg.mla.v_head_dim,
        }
    return out


def _open(folder: str | os.PathLike[str]) -> CheckpointFiles:
    path = Path(folder).expanduser().absolute()
    names = os.listdir(path) if path.is_dir() else []
    pickled = sorted(name for name in names if name.endswith((".bin", ".pt", ".pth")))
    if pickled and not any(name.endswith(".safetensors") for name in names):
        problem = f"{summarise(pickled)}: pickled weights are not read; convert to safetensors"
        raise DrafterError(path, [problem])
    try:
        return CheckpointFiles.open(path)
    except CheckpointError as error:
        raise DrafterError(path, error.problems) from None


def _published_names(files: CheckpointFiles) -> tuple[dict[str, str], list[str]]:
    """Names as the table spells them, to the names in the files; and those met twice.

    Raises:
        DrafterError: these are a target's tensors.
    """
    foreign = [name for name in files.tensors if _OF_A_TARGET.match(name)]
    if foreign:
        problem = f"a target checkpoint, not a drafter (it has {summarise(foreign, 3)})"
        raise DrafterError(files.folder, [problem])
    found: dict[str, str] = {}
    problems = []
    for name in files.tensors:
        if name.endswith(IGNORED_SUFFIXES):
            continue
        published = re.sub(r"^(model\.)?(midlayer\.|layers\.0\.)?", _spell, name, count=1)
        if published in found:
            problems.append(f"{found[published]} and {name} are the same tensor")
        found[published] = name
    return found, problems


def _spell(prefix: re.Match[str]) -> str:
    return _LAYER if prefix[2] else ""


def _check_borrowed(cfg: DrafterConfig, has_own_embedding: bool, has_own_head: bool) -> list[str]:
    problems = []
    V, W = cfg.vocab_size, cfg.draft_vocab_size
    widths = f"width {cfg.hidden_size} cannot use the target's of {cfg.target_hidden_size}"
    is_same_width = cfg.hidden_size == cfg.target_hidden_size
    if not has_own_embedding and not is_same_width:
        problems.append(f"{_EMBEDDING} is missing: a drafter of {widths}")
    if not has_own_head and W != V:
        problems.append(f"{_HEAD} is missing: {W} draft ids of {V} need the drafter's own head")
    elif not has_own_head and not is_same_width:
        problems.append(f"{_HEAD} is missing: a drafter of {widths}")
    return problems


def _explain_extra(cfg: DrafterConfig, extra: dict[str, str]) -> list[str]:
    """Why each tensor, of a published name to the name in the files, is refused."""
    problems, unknown = [], []
    flags = {"input_norm.weight": "norm_before_fc", "fc.weight": "use_aux_hidden_state"}
    for published, name in extra.items():
        flag = "fc_norm" if published.startswith("fc_norm.") else flags.get(published)
        if flag and not getattr(cfg, flag):
            problems.append(f"{name} is there, but {flag} is false in config.json")
        elif published not in _MAP_DTYPES:
            unknown.append(name)
    if unknown:
        problems.append(f"not part of this drafter: {summarise(unknown)}")
    return problems


def _check_tensors(
    files: CheckpointFiles, found: dict[str, str], wanted: Mapping[str, tuple[int, ...]]
) -> list[str]:
    shapes, dtypes = [], []
    for name, shape in wanted.items():
        if name not in found:
            continue
        info, accepted = files.tensors[found[name]], _MAP_DTYPES.get(name, FLOATS)
        if info.shape != shape:
            shapes.append(f"{info.name} {list(info.shape)}, expected {list(shape)}")
        if info.dtype not in accepted:
            dtypes.append(f"{info.name} is {info.dtype}, supported: {' or '.join(accepted)}")
    problems = [f"shape: {summarise(shapes)}"] if shapes else []
    return problems + ([f"dtype: {summarise(dtypes)}"] if dtypes else [])


def _check_map(cfg: DrafterConfig, files: CheckpointFiles, found: dict[str, str]) -> list[str]:
    """What is wrong with the values of `d2t`, and where `t2d` says something else."""
    V, W = cfg.vocab_size, cfg.draft_vocab_size
    if "d2t" not in found and W < V:
        return [f"d2t is missing: nothing says which {W} of the target's {V} ids the drafter has"]

    def stored(name: str, size: int) -> np.ndarray | None:
        info: Any = files.tensors.get(found.get(name, ""))
        is_sound = info and info.shape == (size,) and info.dtype in _MAP_DTYPES[name]
        return files.read(info.name) if is_sound else None

    offsets, mask = stored("d2t", W), stored("t2d", V)
    if "d2t" not in found:
        ids = np.arange(W)
    elif offsets is None:
        return []
    else:
        ids = _to_target_ids(offsets)
        problems = _map_problems(ids, cfg)
        if problems:
            return problems
    if mask is not None:
        differing = np.flatnonzero(mask.astype(bool) != _mask(ids, V))
        if differing.size:
            some = summarise(map(str, differing), 5)
            return [f"t2d disagrees with d2t at target ids {some}"]
    return []


def _map_problems(ids: np.ndarray, cfg: DrafterConfig) -> list[str]:
    """What is wrong with the target ids [W] of draft ids."""
    V, W = cfg.vocab_size, cfg.draft_vocab_size
    # Files whose map was lost hold the zeros it was allocated with, and would read as ids 0..W-1.
    if W < V and np.array_equal(ids, np.arange(W)):
        return [f"d2t is all zero: a map of {W} draft ids among {V} that was never filled in"]
    problems = []
    outside = np.flatnonzero((ids < 0) | (ids >= V))
    if outside.size:
        some = summarise((f"{i} to {ids[i]}" for i in outside), 3)
        problems.append(f"d2t takes draft ids outside the target's {V} ids: {some}")
    values, counts = np.unique(ids, return_counts=True)
    if (counts > 1).any():
        some = summarise(map(str, values[counts > 1]), 5)
        problems.append(f"d2t gives target ids to more than one draft id: {some}")
    elif (np.diff(ids) < 0).any():
        first = int(np.argmax(np.diff(ids) < 0)) + 1
        problems.append(f"d2t: target ids are not ascending, first at draft id {first}")
    return problems


def _to_target_ids(offsets: np.ndarray) -> np.ndarray:
    """Target ids, int64 [W]: draft id + offset (SafeAILab/EAGLE, cnets.py)."""
    return np.arange(len(offsets), dtype=np.int64) + offsets.astype(np.int64)


def _mask(ids: np.ndarray, vocab_size: int) -> np.ndarray:
    """Which of the target's ids are in the draft vocabulary, bool [V]."""
    mask = np.zeros(vocab_size, np.bool_)
    mask[ids] = True
    return mask
