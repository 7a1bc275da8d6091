"""LoRA adapters over one base model: read from PEFT directories, held in slots, applied per row of a packed batch."""
