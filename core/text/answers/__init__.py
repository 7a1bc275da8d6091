"""Answers of chats, read as they come: what is said, what is thought, and calls of tools."""
