"""The process around the server: its log, its exit, its version, how its threads share the interpreter."""
