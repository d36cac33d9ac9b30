"""The one table between published tensors and model parameters, read in both directions.

A row says which axes a parameter has and which the published tensor has, in the letters of
`kimi_jax.axes`; transposes, head splits, the cut of `kv_b_proj` into its key and value halves and
the stacking of experts all follow from the letters. `check` compares a checkpoint with the table;
`load` and `writer` move the bytes. It knows nothing of the model's code, devices or files' layout.
"""

import dataclasses
import functools
import logging
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator

import numpy as np

from kernels_pallas.grouped_matmul.layout import GROUP_SIZE, VALUES_PER_WORD
from kimi_jax.checkpoint.reader import DTYPES, CheckpointError, CheckpointFiles, summarise
from kimi_jax.config import ModelConfig

# Of the arrays as this table and kernels_pallas.grouped_matmul.layout define them. Raise it when
# either changes what an array holds, so that what was converted before is refused.
LAYOUT_VERSION = 1

TEXT_PREFIX = "language_model."
VISION_PREFIXES = ("vision_tower.", "mm_projector.")
# Derived from the configuration; some exporters write it out all the same.
IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)

# Accepted dtypes, as a file spells them. A bias in bfloat16 has lost what tells experts apart, so
# it is loaded with a warning.
FLOATS = ("BF16", "F16", "F32")
_ACCEPTED = {"float": FLOATS, "float32": FLOATS, "words": ("I32",), "shape": ("I32", "I64")}

_log = logging.getLogger(__name__)

# Parameter, its axes; published tensor, its axes as stored ([out, in]). Brackets join axes that
# the file stores as one. An axis missing on the right is the stack over {e}; U and H are the two
# parts of the joined UH.
_TOP = (
    ("embed_tokens", "V D", "model.embed_tokens.weight", "V D"),
    ("norm", "D", "model.norm.weight", "D"),
)
_HEAD = (("lm_head", "D V", "lm_head.weight", "V D"),)
_LAYER = (
    ("input_layernorm", "D", "input_layernorm.weight", "D"),
    ("post_attention_layernorm", "D", "post_attention_layernorm.weight", "D"),
    ("self_attn.q_a_proj", "D Q", "self_attn.q_a_proj.weight", "Q D"),
    ("self_attn.q_a_layernorm", "Q", "self_attn.q_a_layernorm.weight", "Q"),
    ("self_attn.q_b_proj", "Q N UR", "self_attn.q_b_proj.weight", "(N UR) Q"),
    ("self_attn.kv_a_proj_with_mqa", "D CR", "self_attn.kv_a_proj_with_mqa.weight", "CR D"),
    ("self_attn.kv_a_layernorm", "C", "self_attn.kv_a_layernorm.weight", "C"),
    ("self_attn.kv_b_proj_k", "N U C", "self_attn.kv_b_proj.weight", "(N UH) C"),
    ("self_attn.kv_b_proj_v", "N C H", "self_attn.kv_b_proj.weight", "(N UH) C"),
    ("self_attn.o_proj", "N H D", "self_attn.o_proj.weight", "D (N H)"),
)
_MLP = (
    ("gate_proj", "D F", "gate_proj.weight", "F D"),
    ("up_proj", "D F", "up_proj.weight", "F D"),
    ("down_proj", "F D", "down_proj.weight", "D F"),
)
_ROUTER = (
    ("mlp.gate", "D E", "mlp.gate.weight", "E D"),
    ("mlp.e_score_correction_bias", "E", "mlp.gate.e_score_correction_bias", "E"),
)
_EXPERTS = (
    ("gate_proj", "E D F", "{e}.gate_proj.weight", "F D"),
    ("up_proj", "E D F", "{e}.up_proj.weight", "F D"),
    ("down_proj", "E F D", "{e}.down_proj.weight", "D F"),
)
# The published int32 words, seen as bytes of two values: D/2 of them in a row.
_EXPERTS_INT4 = (
    ("gate_proj.packed", "E D/2 F", "{e}.gate_proj.weight_packed", "F D/2"),
    ("gate_proj.scale", "E D/32 F", "{e}.gate_proj.weight_scale", "F D/32"),
    ("up_proj.packed", "E D/2 F", "{e}.up_proj.weight_packed", "F D/2"),
    ("up_proj.scale", "E D/32 F", "{e}.up_proj.weight_scale", "F D/32"),
    ("down_proj.packed", "E F/2 D", "{e}.down_proj.weight_packed", "D F/2"),
    ("down_proj.scale", "E F/32 D", "{e}.down_proj.weight_scale", "D F/32"),
)
# Published beside the words and implied by the configuration: the logical [out, in].
_EXPERT_SHAPES = (
    ("{e}.gate_proj.weight_shape", "F D"),
    ("{e}.up_proj.weight_shape", "F D"),
    ("{e}.down_proj.weight_shape", "D F"),
)
_LAYER_NUMBER = re.compile(r"model\.layers\.(\d+)\.")
_EXPERT_MODULE = re.compile(r"model\.layers\.\d+\.mlp\.experts\.\d+\.(gate|up|down)_proj")
_BYTES_PER_WORD = VALUES_PER_WORD // 2

Index = tuple[slice, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parameter:
    """One model parameter and where its values lie in the published tensors.

    `split_shape` is the published shape with joined axes taken apart; axis `order[i]` of it is
    the parameter's axis i (after the expert axis), from position `start[i]` on.
    """

    path: str
    axes: str
    shape: tuple[int, ...]
    kind: str
    name: str
    num_experts: int | None
    published_shape: tuple[int, ...]
    split_shape: tuple[int, ...]
    order: tuple[int, ...]
    start: tuple[int, ...]

    def name_of(self, expert: int = 0) -> str:
        """The published name, of one expert where they are stacked."""
        return self.name.replace("{e}", str(expert))

    def names(self) -> Iterator[str]:
        """Every published tensor this parameter takes values from."""
        return (self.name.replace("{e}", str(e)) for e in range(self.num_experts or 1))

    def split_index(self, index: Index) -> Index:
        """Where the part `index` (without the expert axis) lies in an array of `split_shape`."""
        cut = [slice(0, size) for size in self.split_shape]
        own = self.shape[-len(self.order) :]
        for axis, start, size, wanted in zip(self.order, self.start, own, index, strict=True):
            first, last, _ = wanted.indices(size)
            cut[axis] = slice(start + first, start + last)
        return tuple(cut)

    def view(self, stored: Callable[[Index], np.ndarray], index: Index) -> np.ndarray:
        """The part `index` (without the expert axis) of the parameter, as a view of what `stored`
        gives for an index into an array of `split_shape`."""
        return stored(self.split_index(index)).transpose(self.order)


@dataclasses.dataclass(frozen=True)
class Published:
    """One published tensor as the table wants it: `kind` says which dtypes it may have."""

    shape: tuple[int, ...]
    kind: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """A checkpoint that fits the configuration: what to read for each parameter.

    `cfg` is the configuration the files speak for: it has a `quantization` only if they are INT4.
    """

    files: CheckpointFiles
    cfg: ModelConfig
    parameters: dict[str, Parameter]
    is_int4: bool
    file_names: dict[str, str]


def parameters(cfg: ModelConfig, *, is_int4: bool) -> dict[str, Parameter]:
    """Every parameter of the model by path, in the order of the layers."""
    return {row.path: row for row in _parameters(cfg, is_int4)}


@functools.lru_cache(maxsize=8)
def _parameters(cfg: ModelConfig, is_int4: bool) -> tuple[Parameter, ...]:
    return tuple(parameter(*row) for row in _rows(cfg, is_int4))


def expected(cfg: ModelConfig, *, is_int4: bool) -> dict[str, Published]:
    """Every text tensor a published checkpoint has, by name without the `language_model.` prefix.

    `is_int4` says how the routed experts are stored.
    """
    out: dict[str, Published] = {}
    for row in parameters(cfg, is_int4=is_int4).values():
        tensor = Published(row.published_shape, row.kind)
        out.update(dict.fromkeys(row.names(), tensor))
    if is_int4:
        out.update(dict.fromkeys(weight_shapes(cfg), Published((2,), "shape")))
    return out


def weight_shapes(cfg: ModelConfig) -> dict[str, tuple[int, int]]:
    """Name and value ([out, in]) of every `weight_shape` tensor of INT4 experts."""
    sizes = _sizes(cfg, cfg.moe_intermediate_size)
    out = {}
    for layer in _moe_layers(cfg):
        for e in range(cfg.n_routed_experts):
            for name, axes in _EXPERT_SHAPES:
                out_size, in_size = (sizes[axis] for axis in axes.split())
                where = f"model.layers.{layer}.mlp.experts.{name.replace('{e}', str(e))}"
                out[where] = (out_size, in_size)
    return out


def check(
    cfg: ModelConfig,
    files: CheckpointFiles,
    *,
    absent: Collection[str] = (),
    with_values: bool = True,
) -> Plan:
    """How to read the checkpoint, once its names, shapes, dtypes and quantisation all fit.

    INT4 experts are recognised by their `weight_packed` tensors, never by the configuration.

    Args:
        cfg: what config.json says.
        files: the checkpoint's tensors.
        absent: published names whose absence has been told already.
        with_values: also reads every `weight_shape`, 8 bytes each; without it only headers count.

    Raises:
        CheckpointError: names everything that does not fit.
    """
    found, problems = _text_names(cfg, files)
    is_int4, explained, refused = _check_storage(cfg, found)
    problems += refused
    if cfg.tie_word_embeddings and "lm_head.weight" in found:
        explained.add("lm_head")
        problems.append(
            f"{found['lm_head.weight']}: present, but tie_word_embeddings makes the embedding "
            "the head"
        )
    wanted = expected(cfg, is_int4=is_int4)
    prefix = TEXT_PREFIX if any(n.startswith(TEXT_PREFIX) for n in found.values()) else ""
    told = {name.removeprefix(TEXT_PREFIX) for name in absent}
    missing = [
        prefix + n
        for n in wanted
        if n not in found and n not in told and _module(n) not in explained
    ]
    extra = [found[n] for n in found if n not in wanted and _module(n) not in explained]
    if missing:
        problems.append(f"missing: {summarise(missing)}")
    if extra:
        problems.append(f"not part of this model: {summarise(extra)}")
    shapes, dtypes, rounded, fitting = [], [], [], set()
    for name, published in wanted.items():
        if name not in found or _module(name) in explained:
            continue
        info = files.tensors[found[name]]
        is_accepted = info.dtype in _ACCEPTED[published.kind]
        if is_accepted and info.shape == published.shape:
            fitting.add(name)
        if info.shape != published.shape:
            shapes.append(f"{info.name} {list(info.shape)}, expected {list(published.shape)}")
        if not is_accepted:
            allowed = " or ".join(_ACCEPTED[published.kind])
            dtypes.append(f"{info.name} is {info.dtype}, supported: {allowed}")
        elif published.kind == "float32" and info.dtype != "F32":
            rounded.append(f"{info.name} ({info.dtype})")
    if shapes:
        problems.append(f"shape: {summarise(shapes)}")
    if dtypes:
        problems.append(f"dtype: {summarise(dtypes)}")
    if is_int4 and with_values:
        implied = {n: shape for n, shape in weight_shapes(cfg).items() if n in fitting}
        problems += _check_weight_shapes(files, found, implied)
    if problems:
        raise CheckpointError(files.folder, problems)
    if rounded:
        _log.warning("biases not stored in float32, near ties may differ: %s", summarise(rounded))
    return Plan(
        files=files,
        cfg=cfg if is_int4 else dataclasses.replace(cfg, quantization=None),
        parameters=parameters(cfg, is_int4=is_int4),
        is_int4=is_int4,
        file_names={name: found[name] for name in wanted if name in found},
    )


def _text_names(cfg: ModelConfig, files: CheckpointFiles) -> tuple[dict[str, str], list[str]]:
    """Text tensors by name without prefix, to their name in the files; and names met twice.

    Layers for multi-token prediction, numbered after the model's own, are left out.
    """
    found: dict[str, str] = {}
    problems: list[str] = []
    skipped = {"vision": 0, "multi-token prediction": 0}
    first, num_layers = cfg.num_hidden_layers, cfg.num_nextn_predict_layers
    for name in files.tensors:
        text_name = name.removeprefix(TEXT_PREFIX)
        layer = _LAYER_NUMBER.match(text_name)
        if name.startswith(VISION_PREFIXES):
            skipped["vision"] += 1
        elif layer and first <= int(layer[1]) < first + num_layers:
            skipped["multi-token prediction"] += 1
        elif not name.endswith(IGNORED_SUFFIXES):
            if text_name in found:
                problems.append(f"{text_name} is there with and without {TEXT_PREFIX!r}")
            found[text_name] = name
    for what, number in skipped.items():
        if number:
            _log.info("%s: skipping %d %s tensors", files.folder, number, what)
    return found, problems


def _check_storage(cfg: ModelConfig, found: dict[str, str]) -> tuple[bool, set[str], list[str]]:
    """Whether the experts are INT4; modules whose faults are explained here; the explanations."""
    modules: dict[str, set[str]] = {"weight": set(), "weight_packed": set()}
    odd: dict[str, set[str]] = {"weight_scale_inv": set()}
    for name in found:
        module, _, leaf = name.rpartition(".")
        if leaf in modules:
            modules[leaf].add(module)
        elif leaf.endswith(("zero_point", "g_idx", "weight_scale_inv")):
            odd.setdefault(leaf, set()).add(module)
    packed = modules["weight_packed"]
    is_expert = {module for module in packed if _EXPERT_MODULE.fullmatch(module)}
    plain = {module for module in modules["weight"] if _EXPERT_MODULE.fullmatch(module)}

    explained: set[str] = set()
    problems: list[str] = []

    def refuse(names: Iterable[str], reason: str) -> None:
        names = sorted(names, key=_natural)
        if names:
            explained.update(names)
            problems.append(f"{reason}: {summarise(names)}")

    for leaf, names in odd.items():
        if leaf == "weight_scale_inv":
            refuse(names, "FP8 block scales are not supported; use the INT4 checkpoint")
        else:
            what = "zero points" if leaf.endswith("zero_point") else "reordered columns"
            refuse(names, f"INT4 with {what} ({leaf}) is not supported")
    refuse(packed - is_expert, "INT4 outside the routed experts is not supported")
    refuse(is_expert & plain, "both weight and weight_packed")
    is_int4 = len(is_expert) >= len(plain) if is_expert else False
    if is_expert - plain and plain - is_expert:
        fewer = plain - is_expert if is_int4 else is_expert - plain
        kind = "INT4" if is_int4 else "not INT4"
        refuse(fewer, f"the routed experts are a mixture: all others are {kind}, but not")
    if is_expert and cfg.quantization is None:
        first = min(is_expert, key=_natural)
        problems.append(
            f"{len(is_expert)} INT4 modules, such as {first}, but config.json has no "
            "quantization_config"
        )
    elif cfg.quantization is not None:
        ignored, bad = _ignored(packed, cfg.quantization.ignore)
        problems += bad
        refuse(ignored, "INT4 in the files, but quantization_config.ignore excludes it")
    if is_int4:
        widths = (("hidden_size", cfg.hidden_size), ("moe_intermediate_size", _width(cfg)))
        for name, size in widths:
            if size % GROUP_SIZE:
                problems.append(
                    f"{name} is {size}: INT4 experts need a multiple of the group of {GROUP_SIZE}"
                )
                explained.update(is_expert)
    return is_int4, explained, problems


def _ignored(modules: set[str], patterns: Iterable[str]) -> tuple[list[str], list[str]]:
    """Modules an ignore list excludes (a name, or `re:` and a regex that matches from the start),
    and the entries that are no regex."""
    names: set[str] = set()
    regexes, bad = [], []
    for pattern in patterns:
        if not pattern.startswith("re:"):
            names.add(pattern.removeprefix(TEXT_PREFIX))
            continue
        try:
            regexes.append(re.compile(pattern.removeprefix("re:")))
        except re.error as error:
            bad.append(f"quantization_config.ignore: {pattern!r} is no regex ({error})")
    hits = [
        module
        for module in modules
        if module in names or any(r.match(module) or r.match(TEXT_PREFIX + module) for r in regexes)
    ]
    return hits, bad


def _check_weight_shapes(
    files: CheckpointFiles, found: dict[str, str], implied: dict[str, tuple[int, int]]
) -> list[str]:
    wrong = []
    for name, shape in implied.items():
        # Not mapped: the kernel maps 64 KiB around each touch, and there are 69,120 of them.
        info = files.tensors[found[name]]
        stored = np.empty(info.shape, DTYPES[info.dtype])
        files.read_into(stored, info.name)
        value = tuple(stored.tolist())
        if value != shape:
            wrong.append(f"{found[name]} says {list(value)}, the words hold {list(shape)}")
    return [f"weight_shape: {summarise(wrong)}"] if wrong else []


def _moe_layers(cfg: ModelConfig) -> list[int]:
    return [i for i in range(cfg.num_hidden_layers) if cfg.is_moe_layer(i)]


def _width(cfg: ModelConfig) -> int:
    # Without MoE layers the width is of no matter.
    return cfg.moe_intermediate_size if _moe_layers(cfg) else GROUP_SIZE


def _rows(cfg: ModelConfig, is_int4: bool) -> Iterator[tuple]:
    """Rows with full names, and the axis sizes that hold for each."""
    dense = _sizes(cfg, cfg.intermediate_size)
    routed = _sizes(cfg, cfg.moe_intermediate_size)
    shared = _sizes(cfg, cfg.moe_intermediate_size * cfg.n_shared_experts)

    def under(path: str, name: str, rows: Iterable[tuple], sizes: dict[str, int]) -> Iterator:
        for own_path, axes, own_name, published_axes in rows:
            yield path + own_path, axes, name + own_name, published_axes, sizes

    yield from under("", "", _TOP, dense)
    for i in range(cfg.num_hidden_layers):
        path, name = f"layers.{i}.", f"model.layers.{i}."
        yield from under(path, name, _LAYER, dense)
        if not cfg.is_moe_layer(i):
            yield from under(f"{path}mlp.", f"{name}mlp.", _MLP, dense)
            continue
        yield from under(path, name, _ROUTER, routed)
        if cfg.n_shared_experts:
            where = "mlp.shared_experts."
            yield from under(path + where, name + where, _MLP, shared)
        experts = _EXPERTS_INT4 if is_int4 else _EXPERTS
        yield from under(f"{path}mlp.experts.", f"{name}mlp.experts.", experts, routed)
    if not cfg.tie_word_embeddings:
        yield from under("", "", _HEAD, dense)


def _sizes(cfg: ModelConfig, width: int) -> dict[str, int]:
    return {
        "V": cfg.vocab_size,
        "D": cfg.hidden_size,
        "F": width,
        "E": cfg.n_routed_experts,
        "N": cfg.num_attention_heads,
        "U": cfg.qk_nope_head_dim,
        "R": cfg.qk_rope_head_dim,
        "H": cfg.v_head_dim,
        "Q": cfg.q_lora_rank,
        "C": cfg.kv_lora_rank,
    }


def parameter(
    path: str, axes: str, name: str, published_axes: str, sizes: dict[str, int]
) -> Parameter:
    """One row of a table: path and axes, published name and axes, the letters' sizes."""
    own = axes.split()
    num_experts = sizes["E"] if "{e}" in name else None
    joined, split = _parse_axes(published_axes)
    published_shape = tuple(math.prod(_shape(group, sizes)) for group in joined)
    kind = "float"
    if path.endswith(".packed"):
        kind = "words"
        published_shape = (*published_shape[:-1], published_shape[-1] // _BYTES_PER_WORD)
    elif path.endswith("e_score_correction_bias"):
        kind = "float32"
    places = [_place(axis, split) for axis in own[num_experts is not None :]]
    return Parameter(
        path=path,
        axes=axes,
        shape=_shape(own, sizes),
        kind=kind,
        name=name,
        num_experts=num_experts,
        published_shape=published_shape,
        split_shape=_shape(split, sizes),
        order=tuple(axis for axis, _ in places),
        start=_shape([before for _, before in places], sizes),
    )


def _shape(axes: Iterable[str], sizes: dict[str, int]) -> tuple[int, ...]:
    """Sizes of axes such as "D", "UH" (the sum), "D/32" and "" (0)."""
    parts = (axis.partition("/") for axis in axes)
    return tuple(sum(map(sizes.__getitem__, axis)) // int(by or 1) for axis, _, by in parts)


@functools.cache
def _parse_axes(text: str) -> tuple[tuple[tuple[str, ...], ...], tuple[str, ...]]:
    """Axes as stored, each the tuple of what it joins; and all of them taken apart."""
    joined = tuple(tuple(group.strip("()").split()) for group in re.findall(r"\([^)]*\)|\S+", text))
    return joined, tuple(axis for group in joined for axis in group)


def _place(axis: str, split: tuple[str, ...]) -> tuple[int, str]:
    """The published axis that holds `axis`, and the letters before it there."""
    if axis in split:
        return split.index(axis), ""
    (at,) = (i for i, whole in enumerate(split) if axis in whole)
    return at, split[at].partition(axis)[0]


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def _natural(name: str) -> list[tuple[int, int, str]]:
    # Expert 10 after expert 9.
    parts = name.split(".")
    return [(0, int(p), "") if p.isdigit() else (1, 0, p) for p in parts]
