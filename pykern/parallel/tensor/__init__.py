"""Shards of a stage's parameters in several processes."""
