"""Speculative decoding with EAGLE-3 drafters, built on `kimi_jax`."""
