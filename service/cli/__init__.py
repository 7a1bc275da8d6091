"""The command `slipstream`: its subcommands, and from start to exit code."""
