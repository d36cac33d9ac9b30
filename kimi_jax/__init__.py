"""Kimi-K2.5 in JAX: the model, its checkpoint, its text, and the decoding loop."""
