"""The executors, and everything that a step runs on the forward thread."""
