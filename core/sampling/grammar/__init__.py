"""Constraints of outputs: from a schema, pattern or grammar to the tokens that may come next."""
