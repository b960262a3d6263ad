"""Pipelines in several processes that are peers of each other in torch.distributed's groups."""
