"""Experts that several engines share: each has some of them, and attention, router and cache of its own."""
