"""Drafts: guesses at the tokens behind a row's newest one, which the next step verifies all at once."""
