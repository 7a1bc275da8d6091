"""Products of a module tree's matrices in compiled code, where transformers computes everything between them."""
