"""Drafts and what becomes of them."""
