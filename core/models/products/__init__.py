"""Matrices, activations and attention of whole texts in compiled code, where transformers computes the rest."""
