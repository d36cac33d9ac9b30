"""Training EAGLE-3 drafters: samples, draft vocabulary, training-time test, checkpoints."""
