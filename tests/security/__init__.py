"""What goes wrong on purpose: bad numbers, bad bytes, bad checkpoints, bad callers; each against the real server."""
