"""gRPC's part of a call: interceptors, statuses, bounded writes, channel arguments."""
