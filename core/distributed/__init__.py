"""Engines that several processes are together: ranks of tensor parallelism."""
