"""Generated code of `protos/slipstream/v1/`."""
