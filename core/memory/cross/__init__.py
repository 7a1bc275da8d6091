"""Pages for the encoder's output, which the decoder of an encoder-decoder attends to."""
