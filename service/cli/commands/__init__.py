"""The subcommands of `slipstream`: one file each, imported when asked for."""
