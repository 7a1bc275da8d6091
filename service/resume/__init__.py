"""Streams that outlive their call: kept for a while, in bounded memory, for a client that comes back with `Attach`."""
