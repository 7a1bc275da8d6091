"""From logits to tokens, independent of the batch a row happens to be in."""
