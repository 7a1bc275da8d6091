"""The dialects of the smg gateway, beside our own service on one port: thin over the same open calls."""
