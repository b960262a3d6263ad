"""Fused operations that save few tensors, and recompute the rest inside their backward kernels.

Each operation has a file with a twin in plain torch, which also runs on the CPU, the operator
registered with torch, and the autograd function. The Triton kernels are in the file of the same
name in `gpu`.
"""
