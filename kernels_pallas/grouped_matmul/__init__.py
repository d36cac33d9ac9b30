"""INT4 group-32 expert products: their contract in plain jnp, and the weights' layout."""
