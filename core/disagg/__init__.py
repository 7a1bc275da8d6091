"""Prefill on one engine, decode on another: how keys and values get from the one to the other."""
