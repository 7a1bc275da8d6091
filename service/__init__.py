"""The gRPC server, its metrics endpoint, its command line and its benchmarks."""
