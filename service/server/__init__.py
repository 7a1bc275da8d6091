"""The server: binds, loads, serves, drains."""
