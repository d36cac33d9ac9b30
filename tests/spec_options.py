"""What the tests of speculation share: a target's configuration, prompt lengths, options."""

from kimi_jax.config import ModelConfig, RopeConfig

TARGET = ModelConfig(
    vocab_size=128,
    hidden_size=64,
    num_hidden_layers=3,
    first_k_dense_replace=1,
    intermediate_size=96,
    moe_intermediate_size=32,
    n_routed_experts=4,
    n_shared_experts=1,
    num_experts_per_tok=2,
    num_attention_heads=4,
    q_lora_rank=24,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=4,
    v_head_dim=8,
    max_position_embeddings=128,
    rope=RopeConfig(factor=4.0, mscale_all_dim=1.0, original_max_position_embeddings=32),
)

# Four rows of very different lengths, the shortest of one token.
SHORT = (1, 2, 16, 17)

OPTIONS = (
    {"temperature": 0.8, "seed": 5},
    {"temperature": 1.0, "seed": 5, "top_k": 4, "top_p": 0.8, "logprobs": 3},
    {"temperature": 1.0, "seed": 6, "min_p": 0.3},
    {"repetition_penalty": 1.5, "logprobs": 2},
    {"logit_bias": {5: 30.0, 6: 29.0}, "presence_penalty": 2.0},
    {"logit_bias": {5: 30.0, 6: 29.0}, "frequency_penalty": 2.0},
)
