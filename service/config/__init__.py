"""Settings: metadata on dataclasses; flags, environment, YAML and tables are made from them."""
