"""Sounds of requests: read from their files, and made into what an encoder hears."""
