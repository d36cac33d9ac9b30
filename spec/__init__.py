"""Speculative decoding with EAGLE-3 drafters, built on `kimi_jax`."""

from spec.drafter import Eagle3Drafter

__all__ = ["Eagle3Drafter"]
