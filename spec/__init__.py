"""Speculative decoding with EAGLE-3 drafters, built on `kimi_jax`."""

from spec.drafter import DEMO_DRAFTER, load_drafter
from spec.tree import DynamicTree, StaticTree

__all__ = ["DEMO_DRAFTER", "DynamicTree", "StaticTree", "load_drafter"]
