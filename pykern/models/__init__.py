"""Reference models, built as chains of layers that are ready to be cut into stages."""

from .gpt import gpt, next_token_loss

__all__ = ["gpt", "next_token_loss"]
