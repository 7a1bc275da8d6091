"""Slots for recurrent states, and snapshots of them that a cached prefix can be resumed from."""
