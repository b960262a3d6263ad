"""Reference models, built as chains of layers that are ready to be cut into stages."""

from .bert import bert
from .gpt import gpt, next_token_loss
from .llama import llama
from .moe import moe, with_balance

__all__ = ["bert", "gpt", "llama", "moe", "next_token_loss", "with_balance"]
