"""Images of prompts on the side of texts: decoded, processed, and placed among tokens."""
