"""From a client's constraint to a compiled grammar: a queue by tenant, a trial in a process, a cache."""
