"""Where the engine is, and how the server gets it."""
