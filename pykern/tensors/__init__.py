"""Trees of tensors, and tensors whose parts lie in several processes."""
