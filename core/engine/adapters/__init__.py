"""LoRA adapters of an engine: the table of those loaded, how they are loaded and unloaded, and how it is all built."""
