"""Outputs on their way to clients: pending ids and text, the stream of a request, and the turns of their readers."""
