"""Which token comes next: sampling options, their device state, and the choice itself.

Everything acts on logits [B, V] in float32, row by row, with one set of options a row. The order is
logit bias, penalties (`edit_logits`), temperature, min_p, top_k, top_p (`filter_logits`), then
Gumbel-max (`sample_tokens`); `choose_tokens` is all of it. What a row draws depends on its seed and
on the absolute position of the token drawn, never on its neighbours, its slot or earlier calls.

One compiled program serves every option: work that no row asks for is skipped at run time. Choosing
sorts nothing; the few best (`top_tokens`) are for logprobs and draft trees. Knows token ids only:
stop strings and stop ids are carried, not applied.
"""

import dataclasses
import math
import numbers
import secrets
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32, Key, UInt32

from kimi_jax.axes import pytree_dataclass

MAX_LOGPROBS = 20

# Under this a float32 quotient of logits may overflow, and the draw is the argmax anyway.
MIN_TEMPERATURE = 1e-5

MAX_FLOAT32 = float(np.finfo(np.float32).max)

# Mesh axes the vocabulary is cut over; None and () are none.
Axis = str | tuple[str, ...] | None

# Which of the random draws at one position, for all rows or each (`position_keys`).
Use = int | Int32[Array, "B"]


# It checks its own fields, and says more about them.
@typing.no_type_check
@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """What one request asks for.

    Args:
        max_new_tokens: most tokens to emit; None emits until the context is full.
        temperature: 0 takes the most likely token (so does anything under 1e-5).
        top_k: keep the k most likely tokens; None, 0, -1 or the vocabulary's size keep all.
        top_p: keep the fewest most likely tokens whose probability reaches p; 1 keeps all.
        min_p: keep tokens at least min_p times as likely as the most likely one; 0 keeps all.
        repetition_penalty: divides positive and multiplies negative logits of every token of the
            prompt or the output; 1 is off.
        presence_penalty: taken off the logit of every token of the output; 0 is off.
        frequency_penalty: the same, once for each time the token occurs in the output.
        logit_bias: added to the logits of these token ids, before anything else.
        seed: the same seed and prompt give the same tokens; None takes a fresh one each request.
        stop: strings that end the output.
        stop_token_ids: token ids that end the output, besides the model's own.
        ignore_eos: go on after the model's own end-of-text ids.
        stop_in_thinking: whether stop strings also count inside the thinking part.
        logprobs: None gives none; n gives the chosen token's and those of the n most likely, all
            of the model's own distribution: no bias, penalty, temperature or filter.
        skip_special_tokens: leave control tokens out of the text.

    Raises:
        ValueError: names every field that is wrong, its value, and what is right.
    """

    max_new_tokens: int | None = 256
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = dataclasses.field(default=None, hash=False)
    seed: int | None = None
    stop: tuple[str, ...] | str = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    stop_in_thinking: bool = False
    logprobs: int | None = None
    skip_special_tokens: bool = True

    def __post_init__(self):
        problems: list[str] = []

        def settle(name: str, value: Any, expected: str | None) -> None:
            if expected is not None:
                problems.append(f"{name} is {getattr(self, name)!r}, expected {expected}")
            object.__setattr__(self, name, value)

        for name, (low, high, expected) in _INTEGERS.items():
            value = getattr(self, name)
            is_right = value is None or (_is_integer(value) and low <= value <= high)
            settle(name, *(_as(int, value), None) if is_right else (value, expected))
        for name, (is_in_range, expected) in _REALS.items():
            value = getattr(self, name)
            is_right = _is_real(value) and is_in_range(value)
            settle(name, *(_as(float, value), None) if is_right else (value, expected))
        for name in ("ignore_eos", "stop_in_thinking", "skip_special_tokens"):
            value = getattr(self, name)
            settle(name, value, None if isinstance(value, bool) else "True or False")
        settle("logit_bias", *_read_logit_bias(self.logit_bias))
        settle("stop", *_read_stop(self.stop))
        settle("stop_token_ids", *_read_stop_token_ids(self.stop_token_ids))
        if problems:
            raise ValueError("SamplingParams: " + "; ".join(problems))

    def check(self, vocab_size: int) -> None:
        """Refuses token ids outside the vocabulary.

        Raises:
            ValueError: names the ids and the fields they stand in.
        """
        problems = []
        for name, ids in (
            ("logit_bias", self.logit_bias or {}),
            ("stop_token_ids", self.stop_token_ids),
        ):
            if outside := [i for i in ids if i >= vocab_size]:
                problems.append(f"{name} has token ids {outside}, expected 0 to {vocab_size - 1}")
        if problems:
            raise ValueError("SamplingParams: " + "; ".join(problems))


_INTEGERS = {
    "max_new_tokens": (1, 2**31 - 1, "None or an integer of at least 1"),
    "top_k": (-1, math.inf, "an integer of at least 1, or None, 0 or -1 for off"),
    "seed": (0, 2**64 - 1, "None or an integer from 0 to 2**64 - 1"),
    "logprobs": (0, MAX_LOGPROBS, f"None or an integer from 0 to {MAX_LOGPROBS}"),
}

_REALS = {
    "temperature": (lambda x: x >= 0, "a finite number, 0 (most likely token) or more"),
    "top_p": (lambda x: 0 < x <= 1, "a number over 0 and up to 1 (1 is off)"),
    "min_p": (lambda x: 0 <= x <= 1, "a number from 0 (off) to 1"),
    "repetition_penalty": (lambda x: 1e-3 <= x <= 1e3, "a number from 0.001 to 1000 (1 is off)"),
    "presence_penalty": (lambda x: -2 <= x <= 2, "a number from -2 to 2 (0 is off)"),
    "frequency_penalty": (lambda x: -2 <= x <= 2, "a number from -2 to 2 (0 is off)"),
}


def _is_integer(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _is_real(value: Any) -> bool:
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        return False
    try:
        # Finite as float32, where it will be used; NaN compares false.
        return abs(float(value)) <= MAX_FLOAT32
    except OverflowError:
        return False


def _as(kind: type, value: Any) -> Any:
    return None if value is None else kind(value)


def _read_logit_bias(value: Any) -> tuple[Any, str | None]:
    expected = "None or a mapping from token ids (integers from 0) to finite numbers"
    if value is None:
        return None, None
    if not isinstance(value, Mapping):
        return value, expected
    if not all(_is_integer(i) and i >= 0 and _is_real(bias) for i, bias in value.items()):
        return value, expected
    return {int(i): float(bias) for i, bias in value.items()}, None


def _read_stop(value: Any) -> tuple[Any, str | None]:
    expected = "a string or a sequence of strings, none of them empty"
    strings = (value,) if isinstance(value, str) else value
    if not isinstance(strings, Sequence) or not all(isinstance(s, str) and s for s in strings):
        return value, expected
    return tuple(strings), None


def _read_stop_token_ids(value: Any) -> tuple[Any, str | None]:
    expected = "a sequence of token ids (integers from 0)"
    if isinstance(value, str) or not isinstance(value, Iterable):
        return value, expected
    ids = tuple(value)
    if not all(_is_integer(i) and i >= 0 for i in ids):
        return value, expected
    return tuple(int(i) for i in ids), None


@pytree_dataclass
class SamplingState:
    """The options of each row, on the device. Build it with `make_sampling_state`.

    `top_k` 0, `top_p` 1, `min_p` 0, penalties 1, 0 and 0, and `num_logprobs` -1 are off. `seed` is
    a 64-bit seed as two words, high first. `logit_bias` is cut along V where the logits are, every
    other field is the same on every device; it is read only if a row `has_logit_bias`.
    """

    temperature: Float32[Array, "B"]
    top_k: Int32[Array, "B"]
    top_p: Float32[Array, "B"]
    min_p: Float32[Array, "B"]
    repetition_penalty: Float32[Array, "B"]
    presence_penalty: Float32[Array, "B"]
    frequency_penalty: Float32[Array, "B"]
    has_logit_bias: Bool[Array, "B"]
    logit_bias: Float32[Array, "B V"]
    seed: UInt32[Array, "B 2"]
    num_logprobs: Int32[Array, "B"]


@pytree_dataclass
class Choice:
    """The next token of each row, and log-probabilities where they were asked for.

    Log-probabilities are the model's own: log-softmax of the logits before bias, penalties,
    temperature and filters. `top_ids` holds the most likely tokens, best first, lowest id first
    among equals; the caller shows the first `num_logprobs`. Rows that asked for none, and places
    beyond the vocabulary, hold logprob 0, id -1 and top logprob -inf.
    """

    token: Int32[Array, "B"]
    logprob: Float32[Array, "B"]
    top_ids: Int32[Array, "B 20"]
    top_logprobs: Float32[Array, "B 20"]


def make_sampling_state(
    params: Sequence[SamplingParams], vocab_size: int, *, shardings: Any = None
) -> SamplingState:
    """One row for each request; a request without a seed gets one from the operating system.

    `shardings` is what `jax.device_put` takes: one placement, or a `SamplingState` of them.

    Raises:
        ValueError: a token id lies outside the vocabulary.
    """
    for p in params:
        p.check(vocab_size)
    logit_bias = np.zeros((len(params), vocab_size), np.float32)
    for row, p in enumerate(params):
        for token, bias in (p.logit_bias or {}).items():
            logit_bias[row, token] = bias
    seeds = [secrets.randbits(64) if p.seed is None else p.seed for p in params]

    def column(dtype: type, values: Iterable[Any]) -> np.ndarray:
        return np.array(list(values), dtype)

    arrays = dict(
        temperature=column(
            np.float32, (p.temperature if p.temperature >= MIN_TEMPERATURE else 0 for p in params)
        ),
        top_k=column(np.int32, (k if 0 < (k := p.top_k or 0) < vocab_size else 0 for p in params)),
        top_p=column(np.float32, (p.top_p for p in params)),
        min_p=column(np.float32, (p.min_p for p in params)),
        repetition_penalty=column(np.float32, (p.repetition_penalty for p in params)),
        presence_penalty=column(np.float32, (p.presence_penalty for p in params)),
        frequency_penalty=column(np.float32, (p.frequency_penalty for p in params)),
        has_logit_bias=column(np.bool_, (bool(p.logit_bias) for p in params)),
        logit_bias=logit_bias,
        seed=column(np.uint32, ((s >> 32, s & 0xFFFFFFFF) for s in seeds)).reshape(-1, 2),
        num_logprobs=column(np.int32, (-1 if p.logprobs is None else p.logprobs for p in params)),
    )
    state = SamplingState(**{name: jnp.asarray(value) for name, value in arrays.items()})
    return state if shardings is None else jax.device_put(state, shardings)


def repeat_rows(sampling: SamplingState, times: int) -> SamplingState:
    """Each row `times` times in a row, for logits [B * times, V] of consecutive positions."""
    return jax.tree.map(lambda x: jnp.repeat(x, times, axis=0), sampling)


def choose_tokens(
    logits_f32: Float32[Array, "B V"],
    *,
    tokens: Int32[Array, "B S"],
    lengths: Int32[Array, "B"],
    prompt_lengths: Int32[Array, "B"],
    sampling: SamplingState,
    axis: Axis = None,
) -> Choice:
    """The token at position `lengths` of each row, and what was asked about it.

    A NaN logit is never chosen, and makes the row's log-probabilities NaN; a row with nothing but
    NaN and -inf chooses token 0.

    Args:
        logits_f32: of the last token of each row; with `axis`, this device's part of V.
        tokens: prompt and output; what lies at or after `lengths` is not read.
        lengths: prompt and output tokens of each row.
        prompt_lengths: of these, the prompt's.
        sampling: the options of each row.
        axis: mesh axis or axes that cut V, inside `jax.shard_map`. If all rows are greedy, devices
            exchange one pair of value and index a row; if not, they gather the edited logits.
    """
    edited = edit_logits(
        logits_f32,
        tokens=tokens,
        lengths=lengths,
        prompt_lengths=prompt_lengths,
        sampling=sampling,
        axis=axis,
    )

    def sampled() -> Int32[Array, "B"]:
        filtered = filter_logits(gather_vocab(edited, axis), sampling)
        return sample_tokens(filtered, sampling=sampling, positions=lengths)

    def greedy() -> Int32[Array, "B"]:
        return argmax_tokens(edited, axis)

    with jax.named_scope("choose"):
        token = lax.cond(jnp.any(sampling.temperature > 0), sampled, greedy)
    return describe_tokens(logits_f32, token, sampling, axis)


def describe_tokens(
    logits_f32: Float32[Array, "B V"],
    token: Int32[Array, "B"],
    sampling: SamplingState,
    axis: Axis = None,
) -> Choice:
    """The choice of these tokens, with the log-probabilities asked for."""
    B = token.shape[0]

    def asked() -> tuple[Array, Array, Array]:
        return _logprobs(logits_f32, token, sampling.num_logprobs >= 0, axis)

    def not_asked() -> tuple[Array, Array, Array]:
        shape = (B, MAX_LOGPROBS)
        top_ids, top = jnp.full(shape, -1, jnp.int32), jnp.full(shape, -jnp.inf, jnp.float32)
        return jnp.zeros((B,), jnp.float32), top_ids, top

    with jax.named_scope("logprobs"):
        logprob, top_ids, top_logprobs = lax.cond(
            jnp.any(sampling.num_logprobs >= 0), asked, not_asked
        )
    return Choice(token=token, logprob=logprob, top_ids=top_ids, top_logprobs=top_logprobs)


def edit_logits(
    logits_f32: Float32[Array, "B V"],
    *,
    tokens: Int32[Array, "B S"],
    lengths: Int32[Array, "B"],
    prompt_lengths: Int32[Array, "B"],
    sampling: SamplingState,
    axis: Axis = None,
) -> Float32[Array, "B V"]:
    """Logits with bias, then repetition penalty, then frequency and presence penalties.

    Token counts are taken from `tokens` at each call and carried nowhere, so that a rejected draft
    leaves no trace.
    """
    V_local = logits_f32.shape[1]
    slot = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    has_repetition = sampling.repetition_penalty != 1
    has_occurrence = (sampling.presence_penalty != 0) | (sampling.frequency_penalty != 0)

    def count(is_counted: Bool[Array, "B S"]) -> Int32[Array, "B V"]:
        local = tokens - _first_id(V_local, axis)
        is_here = is_counted & (local >= 0) & (local < V_local)
        # One past the end is dropped; a negative index would wrap around.
        index = jnp.where(is_here, local, V_local)
        add = jax.vmap(lambda i: jnp.zeros((V_local,), jnp.int32).at[i].add(1, mode="drop"))
        return add(index)

    def repetition(x: Float32[Array, "B V"]) -> Float32[Array, "B V"]:
        is_seen = count(slot < lengths[:, None]) > 0
        penalty = sampling.repetition_penalty[:, None]
        return jnp.where(is_seen, jnp.where(x > 0, x / penalty, x * penalty), x)

    def occurrence(x: Float32[Array, "B V"]) -> Float32[Array, "B V"]:
        times = count((slot >= prompt_lengths[:, None]) & (slot < lengths[:, None]))
        x = x - sampling.frequency_penalty[:, None] * times.astype(jnp.float32)
        return x - jnp.where(times > 0, sampling.presence_penalty[:, None], 0.0)

    def edit() -> Float32[Array, "B V"]:
        x = logits_f32 + sampling.logit_bias
        x = lax.cond(jnp.any(has_repetition), repetition, lambda x: x, x)
        return lax.cond(jnp.any(has_occurrence), occurrence, lambda x: x, x)

    with jax.named_scope("edit_logits"):
        is_edited = sampling.has_logit_bias | has_repetition | has_occurrence
        return lax.cond(jnp.any(is_edited), edit, lambda: logits_f32)


def filter_logits(
    logits_f32: Float32[Array, "B V"], sampling: SamplingState
) -> Float32[Array, "B V"]:
    """Logits whose softmax is exactly the distribution a row draws from; -inf where it is zero.

    Takes edited logits over the whole vocabulary. Each filter sees what the one before left:
    temperature, min_p, top_k, top_p. Among equals at a threshold the lowest ids stay, so exactly k
    tokens stay, and the fewest whose probability reaches p. Greedy rows keep their argmax alone.
    """
    is_sampled = sampling.temperature > 0
    V = logits_f32.shape[1]
    with jax.named_scope("temperature"):
        x = _without_nan(logits_f32)
        best = jnp.max(x, axis=-1, keepdims=True)
        ids = jnp.arange(V, dtype=jnp.int32)[None]
        is_argmax = ids == _lowest_index(x, best)[:, None]
        temperature = jnp.where(is_sampled, sampling.temperature, 1.0)[:, None]
        has_number = best > -jnp.inf
        # The best becomes 0, the rest negative: a small temperature cannot overflow upwards.
        scaled = (x - jnp.where(has_number, best, 0.0)) / temperature
        one_hot = jnp.where(is_argmax, 0.0, -jnp.inf)
        x = jnp.where(is_sampled[:, None] & has_number, scaled, one_hot)
    with jax.named_scope("min_p"):
        x = jnp.where(x >= jnp.log(sampling.min_p)[:, None], x, -jnp.inf)

    def top_k(x: Float32[Array, "B V"]) -> Float32[Array, "B V"]:
        # Counts up to 2^24 are exact in float32.
        k = jnp.where(sampling.top_k > 0, sampling.top_k, V).astype(jnp.float32)
        return jnp.where(_is_in_prefix(x, jnp.ones_like(x), k), x, -jnp.inf)

    def top_p(x: Float32[Array, "B V"]) -> Float32[Array, "B V"]:
        weight = jnp.exp(x)
        target = sampling.top_p * jnp.sum(weight, axis=-1)
        is_kept = _is_in_prefix(x, weight, target) | (sampling.top_p >= 1)[:, None]
        return jnp.where(is_kept, x, -jnp.inf)

    with jax.named_scope("top_k"):
        x = lax.cond(jnp.any(is_sampled & (sampling.top_k > 0)), top_k, lambda x: x, x)
    with jax.named_scope("top_p"):
        return lax.cond(jnp.any(is_sampled & (sampling.top_p < 1)), top_p, lambda x: x, x)


def sample_tokens(
    filtered_f32: Float32[Array, "B V"],
    *,
    sampling: SamplingState,
    positions: Int32[Array, "B"],
) -> Int32[Array, "B"]:
    """A draw from the softmax of each row, fixed by the row's seed and the token's position.

    Gumbel-max: the argmax of logits plus independent noise.
    """
    return argmax_tokens(add_noise(filtered_f32, sampling=sampling, positions=positions))


def add_noise(
    filtered_f32: Float32[Array, "B V"],
    *,
    sampling: SamplingState,
    positions: Int32[Array, "B"],
    use: Use = 0,
) -> Float32[Array, "B V"]:
    """Logits plus independent -log(-log(uniform)), fixed by row's seed, position and `use`.

    The largest is a draw from the softmax; the largest few, in order, are draws without
    replacement.
    """
    V = filtered_f32.shape[1]
    with jax.named_scope("sample"):
        keys = position_keys(sampling, positions, use)
        bits = jax.vmap(lambda key: jax.random.bits(key, (V,), jnp.uint32))(keys)
        # With 32 bits and the fine end of the floats where the largest noise is made, tokens keep
        # their probability down to 2^-32; the usual 23-bit uniform ends at 2^-23. Kept under 1,
        # where the noise would be -inf.
        uniform = (bits.astype(jnp.float32) + 0.5) * 2.0**-32
        noise = -jnp.log(-jnp.log1p(-jnp.minimum(uniform, 1 - 2.0**-24)))
        return filtered_f32 + noise


def position_keys(
    sampling: SamplingState, positions: Int32[Array, "B"], use: Use = 0
) -> Key[Array, "B"]:
    """The PRNG key of each row's token at a position; `use` tells draws at one position apart.

    One use for all rows, or one each. Use 0, the key of the token itself, is not folded in.
    """

    def one(seed: UInt32[Array, "2"], position: Int32[Array, ""]) -> Key[Array, ""]:
        return jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), position)

    keys = jax.vmap(one)(sampling.seed, positions)
    if isinstance(use, int):
        return jax.vmap(lambda key: jax.random.fold_in(key, use))(keys) if use else keys
    return jax.vmap(jax.random.fold_in)(keys, use)


def argmax_tokens(x_f32: Float32[Array, "B V"], axis: Axis = None) -> Int32[Array, "B"]:
    """The id of the largest value of each row, the lowest id among equals; NaN counts as -inf."""
    with jax.named_scope("argmax"):
        x = _without_nan(x_f32)
        # Two reductions: on CPU XLA's argmax is about eight times slower.
        best = jnp.max(x, axis=-1, keepdims=True)
        index = _lowest_index(x, best) + _first_id(x.shape[1], axis)
        if not axis:
            return index
        best, index = _gather_pairs(best, index[:, None], axis)
        is_best = best == jnp.max(best, axis=-1, keepdims=True)
        return jnp.min(jnp.where(is_best, index, jnp.iinfo(jnp.int32).max), axis=-1)


def top_tokens(
    x_f32: Float32[Array, "B V"], k: int, axis: Axis = None
) -> tuple[Int32[Array, "B k"], Float32[Array, "B k"], Float32[Array, "B 1"]]:
    """Ids of the k largest logits of each row, their values, and the log of all the weight.

    Best first, the lowest id first among equals; NaN is never chosen. Devices exchange k + 1 pairs
    a row, not logits. Fewer than k where the vocabulary is smaller.
    """
    B, V_local = x_f32.shape
    with jax.named_scope("top_k"):
        total = jax.nn.logsumexp(x_f32, axis=-1, keepdims=True)
        # Equal values come lowest index first, within a device here and across devices below.
        top, ids = lax.top_k(_without_nan(x_f32), min(k, V_local))
        ids = ids + _first_id(V_local, axis)
        if not axis:
            return ids, top, total
        pairs = jnp.concatenate([total, top], axis=-1), jnp.pad(ids, ((0, 0), (1, 0)))
        width = pairs[0].shape[1]
        values, ids = (x.reshape(B, -1, width) for x in _gather_pairs(*pairs, axis))
        total = jax.nn.logsumexp(values[:, :, 0], axis=-1, keepdims=True)
        top, ids = (x[:, :, 1:].reshape(B, -1) for x in (values, ids))
        top, place = lax.top_k(top, min(k, top.shape[1]))
        return jnp.take_along_axis(ids, place, axis=-1), top, total


def gather_vocab(x: Float32[Array, "B V"], axis: Axis) -> Float32[Array, "B _"]:
    """The whole vocabulary on every device; without `axis`, what is given."""
    if not axis:
        return x
    return lax.all_gather(x, axis, axis=1, tiled=True, to="invarying")


def _logprobs(
    logits: Float32[Array, "B V"],
    token: Int32[Array, "B"],
    is_asked: Bool[Array, "B"],
    axis: Axis,
) -> tuple[Float32[Array, "B"], Int32[Array, "B 20"], Float32[Array, "B 20"]]:
    """Chosen and largest log-probabilities."""
    V_local = logits.shape[1]
    own_ids = jnp.arange(V_local, dtype=jnp.int32)[None] + _first_id(V_local, axis)
    chosen = jnp.max(jnp.where(own_ids == token[:, None], logits, -jnp.inf), axis=-1, keepdims=True)
    if axis:
        chosen = lax.pmax(chosen, axis)
    top_ids, top, total = top_tokens(logits, MAX_LOGPROBS, axis)
    missing = ((0, 0), (0, MAX_LOGPROBS - top.shape[1]))
    top_ids = jnp.pad(top_ids, missing, constant_values=-1)
    top = jnp.pad(top - total, missing, constant_values=-jnp.inf)
    return (
        jnp.where(is_asked, (chosen - total)[:, 0], 0.0),
        jnp.where(is_asked[:, None], top_ids, -1),
        jnp.where(is_asked[:, None], top, -jnp.inf),
    )


def _is_in_prefix(
    x: Float32[Array, "B V"], weight: Float32[Array, "B V"], target: Float32[Array, "B"]
) -> Bool[Array, "B V"]:
    """Whether an entry is in the shortest prefix weighing `target`, largest first, then lowest id.

    No `x` is positive and equal `x` weigh the same. The bits of |x|, as integers, order like |x|,
    so 31 halvings find the threshold exactly.
    """
    size = lax.bitcast_convert_type(jnp.abs(x), jnp.int32)

    def halve(low: Int32[Array, "B"], gap: Int32[Array, "B"]):
        reached = jnp.sum(jnp.where(size <= (low + (gap - 1))[:, None], weight, 0.0), axis=-1)
        return jnp.where(reached >= target, low, low + gap), gap >> 1

    def unrolled(low: Int32[Array, "B"], gap: Int32[Array, "B"]) -> Int32[Array, "B"]:
        for _ in range(31):
            low, gap = halve(low, gap)
        return low

    def looped(low: Int32[Array, "B"], gap: Int32[Array, "B"]) -> Int32[Array, "B"]:
        return lax.fori_loop(0, 31, lambda _, state: halve(*state), (low, gap))[0]

    # On GPU an inner loop would break the step's graph in pieces; elsewhere it compiles ten times
    # faster. The gap hangs on data so that it is no constant and the unrolled kernels are one.
    zero = jnp.zeros_like(target, dtype=jnp.int32)
    gap = jnp.where(target == target, 1 << 30, zero)
    low = lax.platform_dependent(zero, gap, cuda=unrolled, default=looped)
    is_over = size < low[:, None]
    is_tied = size == low[:, None]
    tied_weight = jnp.max(jnp.where(is_tied, weight, 0.0), axis=-1)
    over = jnp.sum(jnp.where(is_over, weight, 0.0), axis=-1)
    num_tied_before = jnp.cumsum(is_tied.astype(jnp.int32), axis=-1) - is_tied.astype(jnp.int32)
    before = over[:, None] + num_tied_before.astype(jnp.float32) * tied_weight[:, None]
    return is_over | (is_tied & ((before < target[:, None]) | (num_tied_before == 0)))


def _without_nan(x: Float32[Array, "*shape"]) -> Float32[Array, "*shape"]:
    return jnp.where(jnp.isnan(x), -jnp.inf, jnp.minimum(x, MAX_FLOAT32))


def _lowest_index(x: Float32[Array, "B V"], value: Float32[Array, "B 1"]) -> Int32[Array, "B"]:
    ids = jnp.arange(x.shape[1], dtype=jnp.int32)[None]
    return jnp.min(jnp.where(x == value, ids, x.shape[1]), axis=-1)


def _first_id(V_local: int, axis: Axis) -> Int32[Array, ""] | int:
    """The token id of this device's first logit."""
    return lax.axis_index(axis) * V_local if axis else 0


def _gather_pairs(
    values: Float32[Array, "B X"], ids: Int32[Array, "B X"], axis: str | tuple[str, ...]
) -> tuple[Float32[Array, "B _"], Int32[Array, "B _"]]:
    """Every device's pairs, in order of device, by one collective."""
    packed = jnp.stack([lax.bitcast_convert_type(values, jnp.int32), ids], axis=-1)
    packed = lax.all_gather(packed, axis, axis=1, tiled=True, to="invarying")
    return lax.bitcast_convert_type(packed[..., 0], jnp.float32), packed[..., 1]
