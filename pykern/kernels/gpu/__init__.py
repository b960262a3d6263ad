"""Triton kernels and what launches them, one file per operation. Nothing else imports Triton."""
