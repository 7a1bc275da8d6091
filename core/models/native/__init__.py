"""Dense decoders computed by our own code on the CPU; `transformers` loads them, proves them, and is the oracle."""
