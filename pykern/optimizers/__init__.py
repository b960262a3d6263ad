"""Optimizers that keep their state elsewhere than with the parameters of a pipeline."""
