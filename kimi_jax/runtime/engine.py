"""The compiled programs of one model on one mesh.

Token ids in, token ids out. A program exists for every capacity, batch size and chunk size in use,
all from short fixed lists, so that after `warm_up` nothing compiles whatever the requests are.
`runtime/run.py` takes requests through them.
"""

import dataclasses
import logging
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kimi_jax.axes import Rules, replace
from kimi_jax.config import ModelConfig
from kimi_jax.model import transformer
from kimi_jax.model.cache import LatentCache, insert_row
from kimi_jax.model.layers import rms_norm
from kimi_jax.runtime import decode as decoding
from kimi_jax.runtime.decode import (
    MAX_BLOCK_TOKENS,
    MAX_DRAFT_DEPTH,
    Block,
    Chunk,
    DecodeState,
    Finish,
    Step,
    TokenLog,
    Weights,
    chunk_sizes,
)
from kimi_jax.runtime.mesh import check_cache, rules_for
from kimi_jax.runtime.sampling import (
    SamplingParams,
    SamplingState,
    argmax_tokens,
    make_sampling_state,
)

_log = logging.getLogger(__name__)

PREFILL_SIZES = (16, 128, 512)
CAPACITY_UNIT = 256
CAPACITY_GROWTH = 4
MEASURED_CYCLES = 7
"""Cycles of a block that measures: as many as a block of the longest proposal holds."""
MAX_STOP_IDS = 16
GROW_FROM = 4096
"""Requests that fit here get their whole capacity at once: reading that many slots is little next
to the weights. Longer ones begin here, and their cache grows as they do."""


@runtime_checkable
class Proposal(Protocol):
    """What each cycle of a speculative step drafts. Hashable; a program is compiled for each."""

    @property
    def num_draft_tokens(self) -> int:
        """Tokens drafted a cycle."""
        ...

    @property
    def depth(self) -> int:
        """Most of them a cycle can accept."""
        ...

    @property
    def num_slots(self) -> int:
        """Cache slots a cycle may write after the newest token's."""
        ...


@dataclasses.dataclass(frozen=True)
class BlockReport:
    """What one block of cycles gave, for whoever chooses the next.

    `row_cycles` and `accepted_by_depth` are means over the rows that were live when it began.
    `is_timed` says whether `seconds` are those of the cycles alone: a block that compiled says
    nothing about the next.
    """

    proposal: Proposal
    cycles: int
    row_cycles: float
    accepted_by_depth: tuple[float, ...]
    seconds: float
    is_timed: bool


@runtime_checkable
class Controller(Protocol):
    """Chooses what to draft, a block at a time."""

    @property
    def current(self) -> Proposal:
        """What it has settled on; asking changes nothing."""
        ...

    def choose(self, lengths: Sequence[int]) -> tuple[Proposal | None, int]:
        """What the cycles of the next block draft, and how many there are at most.

        `lengths` are those of live rows. None is plain decoding, of which the drafter sees nothing:
        rows that draft again after it draft from what it last saw, and are verified as ever.
        """
        ...

    def observe(self, report: BlockReport) -> None:
        """Takes in what a block gave."""
        ...

    def calibrate(self, seconds: Mapping[Any, float]) -> None:
        """Takes in what warm-up measured: seconds a cycle of each proposal."""
        ...


@runtime_checkable
class BoundDrafter(Protocol):
    """A drafter made ready for one target on one mesh: speculative steps, and their own state."""

    taps: tuple[int, ...]
    """Target streams its prefill reads."""

    @property
    def proposals(self) -> tuple[Proposal | None, ...]:
        """What its controllers choose from; a program is compiled for each."""
        ...

    weights: Any
    """Placed on the mesh by `pspecs`."""

    def pspecs(self, rules: Rules) -> Any:
        """Placement of `weights`, in their structure."""
        ...

    def make_step(self, graph: nnx.GraphDef, rules: Rules, proposal: Any) -> Step:
        """A speculative step; its weights are (target weights, `weights`)."""
        ...

    def after_block(
        self,
        weights: Any,
        state: DecodeState,
        graph: nnx.GraphDef,
        rules: Rules,
        proposal: Any,
    ) -> Any:
        """The drafter's state once a block of this proposal's cycles is over; weights as above."""
        ...

    def init_state(self, batch: int, capacity: int) -> Any:
        """The value of `DecodeState.drafter` before the prompt."""
        ...

    def state_pspecs(self, rules: Rules) -> Any:
        """Placement of the drafter's state, in its structure."""
        ...

    def grow(self, drafter_state: Any, batch: int, capacity: int, rules: Rules) -> Any:
        """The drafter's state with room for `capacity` slots a row; on each device's own part."""
        ...

    def insert(self, drafter_state: Any, own: Any, row: jax.Array) -> Any:
        """The drafter's state with this row taken from `own`, one of a single row.

        Both have the same capacity; inside `jax.shard_map` both are the device's parts.
        """
        ...

    def prefill(
        self, weights: Any, drafter_state: Any, chunk: Chunk, graph: nnx.GraphDef, rules: Rules
    ) -> Any:
        """The drafter's state with one prompt chunk taken in; weights as the step's."""
        ...

    def controller(self, batch: int) -> Controller:
        """The one for batches of so many rows."""
        ...


@runtime_checkable
class Drafter(Protocol):
    """What speculation adds to an `LLM`."""

    def check(self, cfg: ModelConfig, mesh: Mesh) -> None:
        """Refuses a target it was not made for, by the small files alone.

        Raises:
            ValueError: says what does not fit.
        """
        ...

    def bind(self, cfg: ModelConfig, mesh: Mesh, dtype: jnp.dtype) -> BoundDrafter:
        """Itself for this target, its weights loaded and placed.

        Raises:
            ValueError: it was not made for this target.
        """
        ...


@dataclasses.dataclass(frozen=True)
class Request:
    """One row: a prompt, its options, and the token ids that end it."""

    prompt: tuple[int, ...]
    params: SamplingParams
    stop_ids: tuple[int, ...]


class Engine:
    """Every compiled program of one model lives here."""

    def __init__(
        self,
        cfg: ModelConfig,
        graph: nnx.GraphDef,
        weights: Weights,
        mesh: Mesh,
        *,
        max_length: int,
        max_batch: int,
        drafter: BoundDrafter | None = None,
        cache: str = "replicated",
        few_programs: bool = False,
    ):
        check_cache(cache, mesh)
        self.cfg, self.mesh, self.rules = cfg, mesh, rules_for(mesh, cache)
        self.max_length, self.max_batch = max_length, max_batch
        self.drafter = drafter
        self.graph = graph
        self._cache_dtype = jax.tree.leaves(weights["norm"])[0].dtype
        self.target_weights = weights
        self._weights = weights if drafter is None else (weights, drafter.weights)
        self.proposals = (None,) if drafter is None else drafter.proposals
        self.slack = cycle_slack(self.proposals, mesh.size if self.rules.mesh_axes("S") else 1)
        self.capacities = capacities_for(max_length + self.slack, few_programs=few_programs)
        self.batch_sizes = ladder(1, max_batch if few_programs else 2, max_batch)
        self._everywhere = NamedSharding(mesh, PartitionSpec())
        self._buckets: set[tuple] = set()
        self._is_warm = False
        self._build_programs()

    # Programs. One jitted function each; JAX keeps a program per shape.

    def _build_programs(self) -> None:
        graph, rules, drafter = self.graph, self.rules, self.drafter
        whole, cache_specs = PartitionSpec(), self._cache_pspecs()
        target_specs = weight_pspecs(self.target_weights, rules)
        all_specs = target_specs if drafter is None else (target_specs, drafter.pspecs(rules))

        def allocate(batch: int, capacity: int):
            cache = LatentCache.empty(self.cfg, batch, capacity, self._cache_dtype)
            own = None if drafter is None else drafter.init_state(batch, capacity)
            return cache, TokenLog.empty(batch), own

        def prefill(weights, state: DecodeState, start: jax.Array, *, size: int) -> DecodeState:
            def local(weights, state, start):
                target = weights if drafter is None else weights[0]
                taps = () if drafter is None else drafter.taps
                state, chunk = decoding.prefill_chunk(
                    graph, target, state, start, size=size, taps=taps, rules=rules
                )
                if drafter is not None:
                    own = drafter.prefill(weights, state.drafter, chunk, graph, rules)
                    state = replace(state, drafter=own)
                return state

            specs = self._state_pspecs(state)
            return self._over_mesh(local, (all_specs, specs, whole), specs)(weights, state, start)

        def decode(
            weights,
            state: DecodeState,
            num_cycles: jax.Array,
            cancelled: jax.Array,
            *,
            proposal: Proposal | None,
        ):
            if proposal is None:
                step, most = decoding.autoregressive_step(graph, rules), 1
                if drafter is not None:
                    step = _of_target(step)
            else:
                assert drafter is not None
                step, most = drafter.make_step(graph, rules, proposal), proposal.depth + 1
            specs = self._state_pspecs(state)

            def run(weights, state, num_cycles, cancelled):
                state, block = decoding.decode(
                    step, weights, state, num_cycles, cancelled, max_tokens_per_cycle=most
                )
                if drafter is not None and proposal is not None:
                    own = drafter.after_block(weights, state, graph, rules, proposal)
                    state = replace(state, drafter=own)
                return state, block

            run = self._over_mesh(run, (all_specs, specs, whole, whole), (specs, whole))
            return run(weights, state, num_cycles, cancelled)

        def verify(weights, cache: LatentCache, tokens, lengths):
            def local(weights, cache, tokens, lengths):
                model = nnx.merge(graph, weights if drafter is None else weights[0])
                out = transformer.forward(
                    model,
                    tokens,
                    lengths[:, None] - 1 + jnp.arange(tokens.shape[1], dtype=jnp.int32),
                    cache,
                    taps=() if drafter is None else drafter.taps,
                    rules=rules,
                )
                logits_f32 = transformer.logits(model, out.hidden)
                rows_f32 = logits_f32.reshape(-1, logits_f32.shape[-1])
                chosen = argmax_tokens(rows_f32, rules.mesh_axes("V"))
                return chosen.reshape(tokens.shape), out.taps, out.cache

            out_specs = (whole, whole, cache_specs)
            run = self._over_mesh(local, (all_specs, cache_specs, whole, whole), out_specs)
            return run(weights, cache, tokens, lengths)

        def logits(weights, cache: LatentCache, tokens, start, num_real):
            def local(weights, cache, tokens, start, num_real):
                model = nnx.merge(graph, weights)
                place = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
                out = transformer.forward(
                    model,
                    tokens,
                    start + place,
                    cache,
                    is_real=place < num_real,
                    rules=rules,
                    is_prefill=True,
                )
                return transformer.logits(model, out.hidden)[0], out.cache

            vocabulary = rules.pspec("T V")
            run = self._over_mesh(
                local,
                (target_specs, cache_specs, whole, whole, whole),
                (vocabulary, cache_specs),
            )
            return run(weights, cache, tokens, start, num_real)

        def hidden_states(weights, tokens, positions, first, is_real, *, taps: tuple[int, ...]):
            def local(weights, tokens, positions, first, is_real):
                model = nnx.merge(graph, weights)
                out = transformer.forward(
                    model,
                    tokens,
                    positions,
                    is_real=is_real,
                    taps=taps,
                    first=first,
                    rules=rules,
                )
                return out.taps, rms_norm(out.hidden, model.norm[...], self.cfg.rms_norm_eps)

            run = self._over_mesh(local, (target_specs, whole, whole, whole, whole), whole)
            return run(weights, tokens, positions, first, is_real)

        def grow(state: DecodeState, *, capacity: int) -> DecodeState:
            B, S = state.tokens.shape
            more = ((0, 0), (0, capacity - S))

            def local(state: DecodeState) -> DecodeState:
                own = None
                if drafter is not None:
                    own = drafter.grow(state.drafter, B, capacity, rules)
                return replace(
                    state,
                    tokens=jnp.pad(state.tokens, more),
                    cache=state.cache.grown(B, capacity // rules.num_shards("S")),
                    drafter=own,
                )

            specs = self._state_pspecs(state)
            return self._over_mesh(local, (specs,), specs)(state)

        def insert(state: DecodeState, own: DecodeState, row: jax.Array) -> DecodeState:
            def local(state: DecodeState, own: DecodeState, row: jax.Array) -> DecodeState:
                drafts = None
                if drafter is not None:
                    drafts = drafter.insert(state.drafter, own.drafter, row)
                rest = insert_row(replace(state, drafter=None), replace(own, drafter=None), row)
                return replace(rest, drafter=drafts)

            specs = self._state_pspecs(state)
            return self._over_mesh(local, (specs, specs, whole), specs)(state, own, row)

        self._grow = jax.jit(grow, static_argnames="capacity")
        own = None if drafter is None else self._placements(drafter.state_pspecs(rules))
        self._allocate = jax.jit(
            allocate,
            static_argnums=(0, 1),
            out_shardings=(self._placements(cache_specs), self._everywhere, own),
        )
        self._insert = jax.jit(insert, donate_argnames="state")
        self._prefill = jax.jit(prefill, static_argnames="size", donate_argnames="state")
        self._decode = jax.jit(decode, donate_argnames="state", static_argnames="proposal")
        self._verify = jax.jit(verify, donate_argnames="cache")
        self._logits = jax.jit(logits, donate_argnames="cache")
        self._hidden_states = jax.jit(hidden_states, static_argnames="taps")

    def _over_mesh(self, function: Callable, in_specs: Any, out_specs: Any) -> Callable:
        """The function on every device's shards; as it is on one device."""
        if self.mesh.size == 1:
            return function
        return jax.shard_map(
            function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )

    def _state_pspecs(self, state: DecodeState) -> DecodeState:
        """The state is whole on every device, but for the logit bias, cut like the logits, the
        cache, and what the drafter cuts of its own."""
        specs = jax.tree.map(lambda _: PartitionSpec(), state)
        own = None if self.drafter is None else self.drafter.state_pspecs(self.rules)
        return replace(
            specs,
            sampling=self._sampling_pspecs(specs.sampling),
            cache=self._cache_pspecs(),
            drafter=own,
        )

    def _cache_pspecs(self) -> LatentCache:
        like = jax.eval_shape(lambda: LatentCache.empty(self.cfg, 1, 1, self._cache_dtype))
        return like.pspecs(self.rules)

    def _placements(self, pspecs: Any) -> Any:
        return jax.tree.map(lambda pspec: NamedSharding(self.mesh, pspec), pspecs)

    def _sampling_pspecs(self, specs: SamplingState) -> SamplingState:
        return replace(specs, logit_bias=self.rules.pspec("B V"))

    def _enter(self, *bucket: Any) -> None:
        """Says once that a program is about to compile that warm-up did not reach."""
        if bucket not in self._buckets:
            self._buckets.add(bucket)
            if self._is_warm:
                _log.warning("compiling a program for %s after warm-up", bucket)
            else:
                _log.info("compiling a program for %s", bucket)

    # Running them.

    def new_state(
        self, requests: Sequence[Request], *, batch: int | None = None, capacity: int | None = None
    ) -> DecodeState:
        """The state before prefill; rows beyond the requests have ended from the start."""
        limits = [self.limit(r) for r in requests]
        B = batch or first_at_least(self.batch_sizes, len(requests))
        S = capacity or self._capacity(requests, [len(r.prompt) for r in requests])
        tokens = np.zeros((B, S), np.int32)
        lengths = np.ones((B,), np.int32)
        row_limits = np.ones((B,), np.int32)
        reasons = np.full((B,), int(Finish.STOP), np.int32)
        stop_ids = np.full((B, MAX_STOP_IDS), -1, np.int32)
        for row, request in enumerate(requests):
            lengths[row] = len(request.prompt)
            tokens[row, : lengths[row]] = request.prompt
            row_limits[row] = limits[row]
            reasons[row] = int(Finish.RUNNING)
            stop_ids[row, : len(request.stop_ids)] = request.stop_ids
        params = [r.params for r in requests] + [SamplingParams(seed=0)] * (B - len(requests))
        sampling = make_sampling_state(params, self.cfg.vocab_size)
        self._enter("allocate", B, S)
        cache, log, own = self._allocate(B, S)
        rows = dict(
            tokens=tokens,
            lengths=lengths,
            prompt_lengths=lengths.copy(),
            limits=row_limits,
            stop_ids=stop_ids,
            reasons=reasons,
            block_start=lengths.copy(),
            cycles=np.zeros((B,), np.int32),
            drafted=np.zeros((B,), np.int32),
            accepted=np.zeros((B, MAX_DRAFT_DEPTH), np.int32),
        )
        state = DecodeState(
            **jax.device_put(rows, self._everywhere),
            sampling=sampling,
            cache=cache,
            log=log,
            drafter=own,
        )
        return jax.device_put(state, self._placements(self._state_pspecs(state)))

    def fit(
        self, state: DecodeState, requests: Sequence[Request], lengths: Sequence[int]
    ) -> DecodeState:
        """The state with room for the next block, rows being `lengths` long.

        It grows by a capacity after the other, so that there are as many programs as capacities.
        """
        B, S = state.tokens.shape
        wanted = self._capacity(requests, lengths)
        for capacity in self.capacities:
            if S < capacity <= wanted:
                self._enter("grow", B, S, capacity)
                state, S = self._grow(state, capacity=capacity), capacity
        return state

    def insert(self, state: DecodeState, request: Request, row: int) -> DecodeState:
        """The state with this request in the row, its prompt taken in; the others are as before.

        The row has ended, and the state has room for the request (`fit`).
        """
        B, S = state.tokens.shape
        own = self.new_state([request], batch=1, capacity=S)
        own = self.prefill(own, len(request.prompt) - 1)
        self._enter("insert", B, S)
        return self._insert(state, own, np.int32(row))

    def _capacity(self, requests: Sequence[Request], lengths: Sequence[int]) -> int:
        limit = max(self.limit(r) for r in requests)
        soon = max(lengths) + MAX_BLOCK_TOKENS
        wanted = min(limit + self.slack, max(soon + self.slack, GROW_FROM))
        return first_at_least(self.capacities, wanted)

    def prefill(self, state: DecodeState, num_tokens: int) -> DecodeState:
        """Fills the cache with the first `num_tokens` prompt tokens of every row."""
        start = 0
        for size in chunk_sizes(num_tokens, PREFILL_SIZES):
            self._enter("prefill", *state.tokens.shape, size)
            state = self._prefill(self._weights, state, np.int32(start), size=size)
            start += size
        return state

    def decode(
        self,
        state: DecodeState,
        num_cycles: int,
        cancelled: np.ndarray,
        proposal: Proposal | None = None,
    ) -> tuple[DecodeState, Block]:
        """One block: up to `num_cycles` cycles that draft this each."""
        self._enter("decode", *state.tokens.shape, proposal)
        return self._decode(
            self._weights,
            state,
            np.int32(num_cycles),
            cancelled,
            proposal=proposal,
        )

    def logits(self, prompt: Sequence[int]) -> Iterator[jax.Array]:
        """Float32 logits [T, V] of the prompt's tokens, chunk by chunk."""
        S = first_at_least(self.capacities, len(prompt))
        padded = np.zeros((1, S), np.int32)
        padded[0, : len(prompt)] = prompt
        self._enter("allocate", 1, S)
        cache, _, _ = self._allocate(1, S)
        start = 0
        for size in chunk_sizes(len(prompt), PREFILL_SIZES):
            self._enter("logits", S, size)
            real = np.int32(len(prompt) - start)
            chunk = padded[:, start : start + size]
            out, cache = self._logits(self.target_weights, cache, chunk, np.int32(start), real)
            yield out
            start += size

    def hidden_states(
        self,
        tokens: np.ndarray,
        positions: np.ndarray,
        first: np.ndarray,
        is_real: np.ndarray,
        *,
        taps: tuple[int, ...],
    ) -> tuple[tuple[jax.Array, ...], jax.Array]:
        """The tapped streams and the final normalised hidden state [B, T, D] of packed sequences.

        Args:
            tokens: [B, T]; sequences one after the other, none read before nor left behind.
            positions: [B, T], of each token in its sequence.
            first: [B, T], the place in the row where each token's sequence begins.
            is_real: [B, T], False for padding.
            taps: streams as `transformer.forward` numbers them.
        """
        self._enter("hidden_states", *tokens.shape)
        return self._hidden_states(
            self.target_weights, tokens, positions, first, is_real, taps=taps
        )

    def replace_drafter_weights(self, weights: Any) -> None:
        """Goes on with other weights of the same drafter; compiled programs stay."""
        assert self.drafter is not None
        old, new = jax.tree.structure(self._weights[1]), jax.tree.structure(weights)
        assert old == new
        self._weights = (self.target_weights, weights)

    def warm_up(self, *, with_logits: bool = False) -> int:
        """Compiles every program requests can reach; returns how many there are."""
        for _ in self.each_program(with_logits=with_logits):
            pass
        return len(self._buckets)

    def each_program(self, *, with_logits: bool = False) -> Iterator[tuple[Any, ...]]:
        """Compiles every program requests can reach and runs it once; names each when it has run.

        At the end of a batch size comes what is measured for the drafter's controller.
        """
        for B in self.batch_sizes:
            for S in self.capacities:
                state = self.new_state([], batch=B, capacity=S)
                yield "allocate", B, S
                for size in _chunks_within(S):
                    self._enter("prefill", B, S, size)
                    state = self._prefill(self._weights, state, np.int32(0), size=size)
                    jax.block_until_ready(state.cache)
                    yield "prefill", B, S, size
                for proposal in self.proposals:
                    nobody = np.zeros((B,), np.bool_)
                    state, block = self.decode(state, 1, nobody, proposal)
                    jax.device_get(block)
                    yield "decode", B, S, proposal
                if B > 1:
                    nothing = self.new_state([], batch=1, capacity=S)
                    self._enter("insert", B, S)
                    state = self._insert(state, nothing, np.int32(0))
                    del nothing
                    jax.block_until_ready(state.cache)
                    yield "insert", B, S
                # A row alone never takes in a longer request.
                can_grow = S >= GROW_FROM or B > 1
                for larger in [c for c in self.capacities if c > S and can_grow][:1]:
                    self._enter("grow", B, S, larger)
                    jax.block_until_ready(self._grow(state, capacity=larger).cache)
                    yield "grow", B, S, larger
                # Its caches go before the next capacity's come.
                del state
            if self._calibrate(B):
                yield "measure", B
        for S in self.capacities if with_logits else ():
            for size in _chunks_within(S):
                self._enter("logits", S, size)
                chunk, cache = np.zeros((1, size), np.int32), self._allocate(1, S)[0]
                self._logits(self.target_weights, cache, chunk, np.int32(0), np.int32(1))
                yield "logits", S, size
        self._is_warm = True

    def cycle_seconds(
        self,
        proposals: Sequence[Proposal | None],
        *,
        batch: int = 1,
        text: Sequence[int] | None = None,
        params: SamplingParams | None = None,
        repeats: int = 5,
    ) -> dict[Proposal | None, float]:
        """Seconds a cycle of each proposal takes here, None being a plain step; medians.

        They take turns in short blocks after this text, each a call of its program with all it
        costs outside the cycles. Without a text it is noise of a few dozen tokens: a token's own
        choice of experts is part of what rows cost. Compiles what is not yet compiled.
        """
        noise = np.random.default_rng(0).integers(0, self.cfg.vocab_size, MAX_BLOCK_TOKENS)
        ids = noise.tolist() if text is None else list(text)
        ids = ids[: max(1, self.max_length - MAX_BLOCK_TOKENS)]
        free = dataclasses.replace(params or SamplingParams(seed=0), max_new_tokens=None)
        requests = [Request(prompt=tuple(ids), params=free, stop_ids=())] * batch
        B = first_at_least(self.batch_sizes, batch)
        end = min(len(ids) + MAX_BLOCK_TOKENS, self.max_length)
        S = first_at_least(self.capacities, end + self.slack)
        state = self.prefill(self.new_state(requests, batch=B, capacity=S), len(ids) - 1)
        nobody = np.zeros((B,), np.bool_)
        seconds: dict[Proposal | None, list[float]] = {proposal: [] for proposal in proposals}
        for repeat in range(repeats + 1):
            for proposal in seconds:
                own = jax.block_until_ready(jax.tree.map(jnp.copy, state))
                began = time.perf_counter()
                _, block = self.decode(own, MEASURED_CYCLES, nobody, proposal)
                done = int(jax.device_get(block.cycles).max())
                # The first call may compile.
                if repeat:
                    seconds[proposal].append((time.perf_counter() - began) / max(done, 1))
        return {proposal: statistics.median(each) for proposal, each in seconds.items()}

    # Programs lowered from shapes alone; the engine's weights may be `jax.ShapeDtypeStruct`s.

    def abstract_state(self, batch: int, capacity: int) -> DecodeState:
        """The shapes and placements of `new_state`'s result."""
        state = jax.eval_shape(lambda: self.new_state([], batch=batch, capacity=capacity))
        return _placed(state, self._placements(self._state_pspecs(state)))

    def lower_prefill(self, batch: int, capacity: int, size: int) -> jax.stages.Lowered:
        """The program that takes in a chunk of `size` prompt tokens a row, not compiled yet."""
        state = self.abstract_state(batch, capacity)
        start = jax.ShapeDtypeStruct((), jnp.int32)
        return self._prefill.lower(self._weights, state, start, size=size)

    def lower_decode(
        self, batch: int, capacity: int, proposal: Proposal | None
    ) -> jax.stages.Lowered:
        """The program of a block of cycles that draft this each, not compiled yet."""
        state = self.abstract_state(batch, capacity)
        num_cycles = jax.ShapeDtypeStruct((), jnp.int32)
        cancelled = jax.ShapeDtypeStruct((batch,), jnp.bool_)
        return self._decode.lower(self._weights, state, num_cycles, cancelled, proposal=proposal)

    def lower_verify(self, batch: int, capacity: int, num_tokens: int) -> jax.stages.Lowered:
        """One forward over `num_tokens` new tokens a row and the greedy choice, not compiled yet.

        No request runs it: it is what a step and a verification share, without what surrounds them,
        so that their launches can be compared. Taps are the drafter's.
        """
        state = self.abstract_state(batch, capacity)
        tokens = jax.ShapeDtypeStruct((batch, num_tokens), jnp.int32)
        return self._verify.lower(self._weights, state.cache, tokens, state.lengths)

    def _calibrate(self, batch: int) -> bool:
        """Tells the controller what a cycle of each proposal costs here, if it has a choice."""
        drafting = [proposal for proposal in self.proposals if proposal is not None]
        if self.drafter is not None and len(drafting) > 1:
            seconds = self.cycle_seconds(drafting, batch=batch)
            self.drafter.controller(batch).calibrate(seconds)
            return True
        return False

    def limit(self, request: Request) -> int:
        """The length at which it ends."""
        new = request.params.max_new_tokens
        return self.max_length if new is None else min(len(request.prompt) + new, self.max_length)


def _of_target(step: Step) -> Step:
    """A plain step where the weights are (the target's, the drafter's)."""
    return lambda weights, state: step(weights[0], state)


def abstract_weights(make: Callable[[], nnx.Module], mesh: Mesh) -> tuple[nnx.GraphDef, Weights]:
    """The structure of the module `make` gives, and its weights as shapes placed on the mesh.

    Nothing is allocated.
    """
    graph, state = nnx.split(nnx.eval_shape(make))
    rules = rules_for(mesh)
    flat = [
        (
            path,
            param.replace(_placed(param.get_value(), NamedSharding(mesh, rules.pspec(param.axes)))),
        )
        for path, param in nnx.to_flat_state(state)
    ]
    return graph, nnx.from_flat_state(flat)


def _placed(shapes: Any, placements: Any) -> Any:
    """The shapes with their placements."""
    return jax.tree.map(
        lambda s, place: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=place), shapes, placements
    )


def weight_pspecs(weights: Weights, rules: Rules) -> Weights:
    """Each parameter's placement, in the weights' structure."""
    return jax.tree.map(
        lambda param: param.replace(rules.pspec(param.axes)),
        weights,
        is_leaf=lambda x: isinstance(x, nnx.Variable),
    )


def _chunks_within(capacity: int) -> list[int]:
    """The chunk sizes prompts can need where rows have so many slots (see `chunk_sizes`)."""
    return [size for size in PREFILL_SIZES if size <= capacity]


def ladder(first: int, growth: int, last: int) -> tuple[int, ...]:
    """first, first * growth, ... and at the end the least multiple of `first` that holds `last`.

    None but the last is more than half of it: a program for hardly less would not pay.
    """
    top = -(-last // first) * first
    sizes = []
    size = first
    while 2 * size <= top:
        sizes.append(size)
        size *= growth
    return (*sizes, top)


def capacities_for(num_slots: int, *, few_programs: bool = False) -> tuple[int, ...]:
    """The capacities of caches that have to hold so many slots a row at the longest."""
    sizes = ladder(CAPACITY_UNIT, CAPACITY_GROWTH, num_slots)
    if not few_programs:
        return sizes
    return tuple(size for size in sizes if size >= GROW_FROM) or sizes[-1:]


def cycle_slack(proposals: Iterable[Proposal | None], num_shares: int = 1) -> int:
    """Slots a row needs after its last token: a cycle writes rows for all its tokens before it
    knows how many it keeps.

    Of a cache shared out over devices each masks as many slots of a tree, which reach a little
    further.
    """
    return max(0 if p is None else p.num_slots for p in proposals) + num_shares - 1


def first_at_least(sizes: Sequence[int], wanted: int) -> int:
    """The smallest of ascending sizes that holds `wanted`."""
    return next(size for size in sizes if size >= wanted)
