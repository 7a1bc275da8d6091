"""Streams, events, pinned staging and device-side checks: the only floor that knows which accelerator is there."""
