"""Checkpoints by name: from a hub that speaks Hugging Face's protocol, through `huggingface_hub`."""
