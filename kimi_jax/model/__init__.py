"""The Kimi-K2.5 text model: weights in Flax modules, mathematics in functions."""
