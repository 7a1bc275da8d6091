"""Pipeline parallelism: the part of a model's layers that one rank has, and how hidden states go round the ranks."""
