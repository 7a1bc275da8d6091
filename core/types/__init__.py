"""Plain data that crosses floors. No torch here: front ends import these without an accelerator runtime."""
