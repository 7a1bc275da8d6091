"""Pages for layers with a sliding window, which give up what no token can see any more."""
