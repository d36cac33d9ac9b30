"""What a step and a cycle launch: of this project as compiled, or of another engine.

Counts alone, no times. A cycle is a plain step and so much more for each draft token.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from kimi_jax.config import ModelConfig
from spec.economics import Number


@dataclasses.dataclass(frozen=True, kw_only=True)
class Counts:
    """Launches of a plain step, and how many more each draft token makes of it."""

    kernels: Number
    """And copies and conditionals: all in a graph that is no collective."""
    kernels_a_draft: Number
    all_reduces: Number
    all_reduces_a_draft: Number
    all_gathers: Number
    """Of the greedy choice; a layer's exchanges of a shared-out cache are not among them."""
    all_gathers_a_draft: Number
    host: Number
    host_a_draft: Number
    temp_bytes: int
    source: str
    assumption: str = ""


# Kimi-K2.5 on 8x RTX PRO 6000, 61 layers, K = 3 (compile_check.py, JAX 0.12.0.1, November 2026):
# step 696 kernels, 3 copies, 4 conditionals; cycle 795, 2, 4; 123 and 132 all-reduces; one graph;
# temporaries of a prefill chunk 170 MB.
KERNELS_A_LAYER, KERNELS_AROUND, KERNELS_A_DRAFT = 11, 32, 33
SEQUENCE_KERNELS_A_LAYER = 17
"""With the cache's slots shared out (five layers compiled): what is exchanged is also arranged."""
ALL_REDUCES_A_LAYER, ALL_REDUCES_AROUND, ALL_REDUCES_A_DRAFT = 2, 1, 3
PREFILL_TEMP_BYTES = 170_000_000
LOOP_LAUNCHES = 2
"""Of the host in a pass of the loop beside its graph: the condition's kernel, and reading it."""
FEWEST_A_LAYER = 9
"""Kernels of a layer in the smallest form found (whole layers of Pallas kernels, compiled only)."""
KERNEL_KINDS = ("kCustomKernel", "kCopy", "kConditional")


def default_counts(layers: int, cache: str = "replicated") -> Counts:
    """Of this project, from what the compile check found."""
    a_layer = KERNELS_A_LAYER if cache == "replicated" else SEQUENCE_KERNELS_A_LAYER
    return Counts(
        kernels=a_layer * layers + KERNELS_AROUND,
        kernels_a_draft=KERNELS_A_DRAFT,
        all_reduces=ALL_REDUCES_A_LAYER * layers + ALL_REDUCES_AROUND,
        all_reduces_a_draft=ALL_REDUCES_A_DRAFT,
        all_gathers=1,
        all_gathers_a_draft=1,
        host=1 + LOOP_LAUNCHES,
        host_a_draft=0,
        temp_bytes=PREFILL_TEMP_BYTES,
        source=f"{a_layer} kernels and {ALL_REDUCES_A_LAYER} all-reduces a layer, one "
        "graph a cycle, as compile_check.py found for Kimi-K2.5 (JAX 0.12)",
        assumption="the launch list is the one of Kimi-K2.5 on 8x RTX PRO 6000; --launches takes "
        "another",
    )


def engine_counts(kernels_a_layer: int, layers: int) -> Counts:
    """Of another engine: a graph for a forward, and one for each pass of the drafter."""
    return dataclasses.replace(
        default_counts(layers),
        kernels=kernels_a_layer * layers + KERNELS_AROUND,
        kernels_a_draft=kernels_a_layer + KERNELS_A_DRAFT - KERNELS_A_LAYER,
        host=1,
        host_a_draft=1,
        source=f"another engine: {kernels_a_layer} kernels and {ALL_REDUCES_A_LAYER} all-reduces a "
        "layer, a graph a forward and one for each pass of the drafter",
        assumption="outside its layers the engine launches what this project does",
    )


def read_counts(
    run: Mapping[str, Any],
    where: str,
    cfg: ModelConfig,
    devices: int,
    batch: int,
    cache: str = "replicated",
) -> Counts:
    """From the JSON of `scripts/compile_check.py`; layers it left out are as those it has.

    Args:
        run: its object.
        where: the file's name, for errors and as the source.
        cfg: the whole model, over so many devices and streams.
        cache: where the latent cache lies.

    Raises:
        ValueError: another file, or programs of another model, device count or batch.
    """
    told, programs = run.get("conditions", {}), run.get("programs")
    if not isinstance(programs, dict) or not {"step", "cycle"} <= programs.keys():
        raise ValueError(f"{where}: not of compile_check.py with its programs step and cycle")
    try:
        layers = int(told["layers"])
        whole = dataclasses.replace(cfg, num_hidden_layers=layers).to_dict()
        differing = [name for name, value in whole.items() if told["config"].get(name) != value]
        expected = {"compiled_devices": devices, "batch": batch, "cache": cache}
        # Outputs older than the choice are of a replicated cache.
        known = {"cache": "replicated", **told}
        differing += [name for name, value in expected.items() if known[name] != value]
        # Only in what the model is called.
        differing = [name for name in differing if name != "model_type"]
        if differing or not 0 < layers <= cfg.num_hidden_layers:
            raise ValueError(
                f"{where}: compiled for something else: {', '.join(differing or ['layers'])}"
            )
        step, cycle, drafts = programs["step"], programs["cycle"], int(told["draft_tokens"])
        missing = cfg.num_hidden_layers - layers

        def nodes(program: Mapping[str, Any]) -> int:
            return sum(program["launches"].get(kind, 0) for kind in KERNEL_KINDS)

        def host(program: Mapping[str, Any]) -> int:
            return program["graphs"] + program["launches_outside_graphs"]

        def a_draft(figure: str) -> float:
            return (cycle[figure] - step[figure]) / drafts

        counted = [nodes(step), nodes(cycle) - nodes(step)]
        counted += [step["all_reduces"]] if devices > 1 else []
        if run.get("failures") or drafts < 1 or min(counted) <= 0:
            raise ValueError(f"{where}: not of a compilation that went well: counts of nothing")
        # What is outside graphs is so in every layer.
        host_a_layer = 2 * step["all_reduces_per_layer_most"] if host(step) > layers else 0
        return Counts(
            kernels=nodes(step) + missing * step["kernels_per_layer"],
            kernels_a_draft=(nodes(cycle) - nodes(step)) / drafts,
            all_reduces=step["all_reduces"] + missing * step["all_reduces_per_layer_most"],
            all_reduces_a_draft=a_draft("all_reduces"),
            all_gathers=step["all_gathers"] - (layers if cache == "sequence" else 0),
            all_gathers_a_draft=a_draft("all_gathers"),
            host=host(step) + LOOP_LAUNCHES + missing * host_a_layer,
            host_a_draft=(host(cycle) - host(step)) / drafts,
            temp_bytes=max(program["temp_bytes"] for program in programs.values()),
            source=f"{where}: {layers} layers compiled for {devices}x {told['hardware']}, "
            f"K = {drafts}, JAX {told['jax']}",
            assumption=f"{missing} layers that were not compiled are as the others"
            if missing
            else "",
        )
    except (KeyError, TypeError, AttributeError, ZeroDivisionError) as error:
        raise ValueError(f"{where}: not a whole output of compile_check.py ({error!r})") from None
