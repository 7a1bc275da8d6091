"""The inference engine: everything between a request and its tokens, and nothing about gRPC or Prometheus."""
