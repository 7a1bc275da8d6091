"""Heads that draft for another model from what its inner layers say: EAGLE-3 (Li et al. 2025)."""
