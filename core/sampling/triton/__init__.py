"""Sampling by our own Triton kernels, for CUDA: what lies between a step's logits and its tokens in two launches."""
