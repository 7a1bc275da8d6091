"""Plans one step after another from host state only; makes no accelerator call."""
