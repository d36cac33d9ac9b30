"""A machine planned: predicted speed for each number of draft tokens, memory, and what costs most.

Puts together what a forward reads (`spec/traffic.py`), what it launches (`spec/launches.py`), the
machine's figures (`spec/machines.py`) and the formulas (`spec/economics.py`). Bytes are those of
one device with the model over `tensor=devices`: every weight but the routed experts once a forward,
of those the distinct ones of its rows, and the cache. Arithmetic, prefill, sampling with options
and waiting for the host are not in it.
"""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp

from kernels_pallas.compile_only import HARDWARE
from kimi_jax.config import ModelConfig
from kimi_jax.runtime.engine import CAPACITY_UNIT
from spec import economics, machines
from spec.eagle3.config import DrafterConfig
from spec.economics import Collective, Read, Work
from spec.launches import FEWEST_A_LAYER, Counts
from spec.machines import INTERCONNECTS, Interconnect
from spec.memory import Sizes, held
from spec.traffic import EXPERTS, DrafterBytes, TargetBytes

DTYPE = jnp.dtype(jnp.bfloat16)
GATHERED_BYTES = 8
"""A row's best value and its id, of each device."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What is planned, checked."""

    cfg: ModelConfig
    drafter: DrafterConfig
    hardware: str
    devices: int
    interconnect: Interconnect
    context: int
    cache: str
    """Where the latent cache lies, of `kimi_jax.runtime.mesh.CACHES`."""
    batch: int
    rates: tuple[float, ...]
    """By depth, as many as the longest draft."""
    counts: Counts
    distinct: tuple[float, ...]
    """Experts of a layer that n rows of one stream read, from n = 1."""
    assumptions: tuple[str, ...]
    target: TargetBytes
    drafts: DrafterBytes

    def step(self) -> Work:
        """A plain step."""
        return self.cycle(0)

    def cycle(self, K: int) -> Work:
        """A cycle with K draft tokens; 0 is the plain step."""
        rows, counts, drafts = self.batch * (K + 1), self.counts, self.drafts
        dense = machines.DENSE_EFFICIENCY.value
        packed = dense if self.cfg.quantization is None else machines.PACKED_EFFICIENCY.value
        distinct = economics.distinct_of_streams(
            self.distinct[K], self.batch, self.cfg.n_routed_experts
        )
        reads = {
            name: Read(num_bytes=num_bytes, efficiency=dense)
            for name, num_bytes in self.target.read.items()
        }
        reads[EXPERTS] = Read(num_bytes=distinct * self.target.expert, efficiency=packed)
        slots = self.batch * self.context
        reads["latent cache"] = Read(num_bytes=slots * self.target.slot, efficiency=dense)
        if K:
            read = K * (drafts.layer + drafts.head + slots * drafts.slot) + drafts.fuse
            reads["drafter"] = Read(num_bytes=read, efficiency=dense)
        return Work(
            reads=reads,
            kernels=counts.kernels + K * counts.kernels_a_draft,
            collectives=self._collectives(K, rows) if self.devices > 1 else (),
            host_launches=counts.host + K * counts.host_a_draft,
        )

    def _collectives(self, K: int, rows: int) -> tuple[Collective, ...]:
        counts = self.counts
        width, gathered = self.cfg.hidden_size * DTYPE.itemsize, self.devices * GATHERED_BYTES
        found = [
            Collective(kind="all-reduce", count=counts.all_reduces, num_bytes=rows * width),
            Collective(kind="all-gather", count=counts.all_gathers, num_bytes=rows * gathered),
        ]
        if self.cache == "sequence":
            # In every layer queries go to all devices, and each head's parts to the one that has
            # it (with a float32 beside the values).
            cfg, layers = self.cfg, self.cfg.num_hidden_layers
            heads = rows * cfg.num_attention_heads * DTYPE.itemsize
            for values in (cfg.latent_width, cfg.kv_lora_rank + 4 // DTYPE.itemsize):
                found.append(Collective(kind="all-gather", count=layers, num_bytes=heads * values))
        if K:
            # The drafter runs over its K - 1 first tokens one by one, and once over all rows.
            each = counts.all_reduces_a_draft
            found += [
                Collective(kind="all-reduce", count=(K - 1) * each, num_bytes=self.batch * width),
                Collective(kind="all-reduce", count=each, num_bytes=rows * width),
                Collective(
                    kind="all-gather",
                    count=K * counts.all_gathers_a_draft,
                    num_bytes=self.batch * gathered,
                ),
            ]
        return tuple(found)

    def machine(self) -> economics.Machine:
        """The machine."""
        return machines.make_machine(HARDWARE[self.hardware], self.interconnect, self.devices)


def plan_rows(plan: Plan) -> list[dict[str, Any]]:
    """The prediction for each number of draft tokens."""
    machine = plan.machine()
    step = economics.pass_seconds(plan.step(), machine)
    rows = []
    for K in range(len(plan.rates) + 1):
        cycle = economics.pass_seconds(plan.cycle(K), machine)
        tokens = economics.expected_tokens_per_cycle(plan.rates[:K])
        rows.append(
            {
                "draft_tokens": K,
                "ms_step": round(1e3 * step, 3),
                "ms_cycle": round(1e3 * cycle, 3),
                "break_even": round(economics.break_even(cycle, step), 3),
                "tokens_per_cycle": round(tokens, 3),
                "tokens_per_second": round(economics.tokens_per_second(tokens, cycle), 1),
            }
        )
    return rows


def best_draft_tokens(plan: Plan) -> int:
    """The number with the most tokens a second."""
    machine = plan.machine()
    seconds = {
        K: economics.pass_seconds(plan.cycle(K), machine) for K in range(len(plan.rates) + 1)
    }
    return economics.best_num_draft_tokens(plan.rates, seconds)


def plan_memory(plan: Plan) -> dict[str, Any]:
    """Bytes on a device; what is reserved and temporary is assumed or compiled."""
    capacity = math.ceil(plan.context / CAPACITY_UNIT) * CAPACITY_UNIT
    sizes = Sizes.of(plan.cfg, plan.target.resident, plan.target, plan.drafts)
    parts = {
        **held(sizes, plan.batch, capacity),
        "temporary_bytes": plan.counts.temp_bytes,
        "reserved_bytes": int(1e9 * machines.RESERVED.value),
    }
    total, device = sum(parts.values()), HARDWARE[plan.hardware].memory_bytes
    caches = parts["cache_bytes"] + parts["drafter_cache_bytes"]
    a_token = plan.batch * (plan.target.slot + plan.drafts.slot)
    room = max(0, int((device - total + caches) // a_token) // CAPACITY_UNIT * CAPACITY_UNIT)
    return {
        **parts,
        "total_bytes": total,
        "device_bytes": device,
        "fits": total <= device,
        "spare_bytes": device - total,
        "longest_context": min(room, plan.cfg.max_position_embeddings),
    }


def largest_terms(plan: Plan, K: int, count: int = 3) -> list[dict[str, Any]]:
    """What most of a cycle goes to, and what would shrink it."""
    work, machine = plan.cycle(K), plan.machine()
    terms = economics.seconds_by_term(work, machine)
    total = math.fsum(terms.values())
    largest = sorted(terms, key=lambda term: -terms[term])[:count]
    return [
        {
            "term": term,
            "ms": round(1e3 * terms[term], 3),
            "share": round(terms[term] / total, 3),
            "shrink": _shrink(plan, term, terms[term], work, machine),
        }
        for term in largest
    ]


def _shrink(plan: Plan, term: str, seconds: float, work: Work, machine: economics.Machine) -> str:
    layers = plan.cfg.num_hidden_layers
    if term == "kernels":
        one = 1e3 * layers * machine.kernel_seconds
        return (
            f"fewer launches: a kernel less in every layer saves {one:.2f} ms; the smallest form "
            f"found has {FEWEST_A_LAYER} a layer, here {work.kernels / layers:.1f} with what is "
            "around the layers"
        )
    if term in ("all-reduce", "all-gather"):
        size = max(c.num_bytes for c in work.collectives if c.kind == term)
        num = sum(c.count for c in work.collectives if c.kind == term)
        here = f"{num:.0f} of {1e6 * seconds / num:.1f} us"
        family = "nvlink" if HARDWARE[plan.hardware].nvlinks else "pcie-switch-one-shot"
        other = INTERCONNECTS[family]
        better = math.fsum(
            c.count * other.latencies[term].seconds(c.num_bytes)
            for c in work.collectives
            if c.kind == term
        )
        if better < 0.95 * seconds:
            return (
                f"{here}: {other.title} would save {1e3 * (seconds - better):.2f} ms; less latency "
                f"at {size / 1e3:.0f} KB is all that counts (NCCL_PROTO=LL, a topology file)"
            )
        return f"{here}: a kernel that also takes the residual sum and the norm; fewer devices"
    if term == "host":
        return "one graph a cycle: collectives inside graphs (JAX 0.11 or newer)"
    read = work.reads[term]
    gigabytes = f"{read.num_bytes / 1e9:.2f} GB at {100 * read.efficiency:.0f} % of the bandwidth"
    if term == EXPERTS:
        dense = machines.DENSE_EFFICIENCY.value
        saved = 1e3 * seconds * (1 - read.efficiency / dense)
        faster = f"; kernels at {100 * dense:.0f} % would save {saved:.2f} ms" if saved > 0 else ""
        return f"{gigabytes}{faster}; fewer rows; rows that share experts (measure with --routing)"
    if term == "attention kept whole":
        saved = 1e3 * seconds * (1 - 1 / plan.devices)
        gather = (
            1e3
            * layers
            * machine.latencies["all-gather"].seconds(plan.batch * plan.cfg.hidden_size)
        )
        return (
            f"{gigabytes}: q_a and kv_a cut over the devices would save {saved:.2f} ms and cost "
            f"{gather:.2f} ms for a gather a layer; 8-bit weights would save {500 * seconds:.2f} ms"
        )
    if term == "latent cache" and plan.cache == "sequence":
        return f"{gigabytes}: a shorter context; more devices"
    if term == "latent cache":
        return (
            f"{gigabytes}: a shorter context; cut along the sequence it would be "
            f"{1e3 * seconds * (1 - 1 / plan.devices):.2f} ms less, and two exchanges a layer more "
            "(--cache sequence)"
        )
    if term == "drafter":
        return f"{gigabytes}: fewer drafts, a smaller draft vocabulary, a narrower drafter"
    return f"{gigabytes}: 8-bit weights would save {500 * seconds:.2f} ms; more devices"
