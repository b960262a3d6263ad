"""Recompute: keeps part of a forward for its backward, and computes the rest again."""
