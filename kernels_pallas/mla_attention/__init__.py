"""Attention over the latent cache: its contract in plain jnp."""
