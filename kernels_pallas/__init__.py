"""Array operations of the model and their kernels; each op's plain jnp form is its contract."""
