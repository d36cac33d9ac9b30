"""Speculative decoding with EAGLE-3 drafters, built on `kimi_jax`."""

from spec.drafter import load_drafter
from spec.tree import DynamicTree, StaticTree

__all__ = ["DynamicTree", "StaticTree", "load_drafter"]
