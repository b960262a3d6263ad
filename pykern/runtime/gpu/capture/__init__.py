"""Actions as CUDA graphs."""
