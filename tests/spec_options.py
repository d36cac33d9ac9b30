"""Requests that the tests of speculation share: prompt lengths and sampling options."""

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
