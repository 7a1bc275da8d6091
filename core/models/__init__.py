"""Models behind one contract: a packed row of tokens in, logits of the asked rows out."""
