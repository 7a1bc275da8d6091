"""Compiled code: what makes it on the machine it runs on, keeps it, and says whether it may be loaded."""
