"""Sums of gradients over processes that train with batches of their own."""
