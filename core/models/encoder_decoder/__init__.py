"""Encoder-decoders of transformers (BART, T5): an encoder batched by itself, and a packed decoder."""
