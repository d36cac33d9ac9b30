"""Kimi-K2.5 in JAX: the model, its checkpoint, its text, and the decoding loop."""

from kimi_jax.runtime.llm import DEMO as DEMO
from kimi_jax.runtime.llm import LLM as LLM
from kimi_jax.runtime.replies import Result as Result
from kimi_jax.runtime.sampling import SamplingParams as SamplingParams
