"""The records handed from scheduler to forward thread and back. Frozen: what was submitted never changes."""
