"""LoRA adapters of an engine: their books, how they are loaded and unloaded, and how all of that is built."""
