"""Calls that are open on the engine: admitted, held and, where they are kept, found again."""
