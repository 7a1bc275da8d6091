"""One-line breakages of the production code, each of which a named test must notice."""
