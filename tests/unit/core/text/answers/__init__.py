"""Tests of answers that are read."""
