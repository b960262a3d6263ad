"""Reference models, built as chains of layers that are ready to be cut into stages."""

from .bert import bert
from .gpt import gpt, next_token_loss

__all__ = ["bert", "gpt", "next_token_loss"]
