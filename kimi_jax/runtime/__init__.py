"""Decoding: the state, the step, the loop, sampling, and the `LLM` users call."""
