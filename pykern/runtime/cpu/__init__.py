"""Stages on CPU workers."""
