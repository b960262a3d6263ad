"""Stages on GPUs."""
