"""Triton kernels and their launchers, one file per operation. Only this package imports Triton."""
