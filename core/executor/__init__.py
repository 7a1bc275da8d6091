"""The forward thread and everything that runs on it."""
