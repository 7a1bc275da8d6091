"""Protobuf messages to the engine's requests, and its events back to messages."""
