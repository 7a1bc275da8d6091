"""A client in another language."""
