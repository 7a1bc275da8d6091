"""Models that see: what their towers make of images, and how the tokens of an image see each other."""
