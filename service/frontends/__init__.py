"""`--frontends N`: gRPC in processes of their own, in front of the one engine process."""
