"""Benchmarks: one file per claim, each against a baseline in the same run."""
