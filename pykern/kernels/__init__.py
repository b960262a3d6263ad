"""Fused operations that keep little for their backward and make the rest again within its kernels.

Each is a file: a twin in plain torch, which is also what runs on the CPU, the operation as torch
knows it, and the autograd function; its Triton kernels are in the file of the same name in `gpu`.
"""
