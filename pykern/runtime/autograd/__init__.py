"""Cuts of autograd graphs, and backwards in two parts."""
