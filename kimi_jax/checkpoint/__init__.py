"""Published checkpoints: checked, mapped to the model by one table, loaded per device shard."""
