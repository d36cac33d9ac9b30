"""Token ids to text and back: tokenizer, chat template, reply parser, streaming."""
