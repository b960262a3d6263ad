"""fairscale's Pipe, which is torchgpipe's GPipe by another name, over pykern's runtime."""

from .torchgpipe import skip
from .torchgpipe.gpipe import GPipe as Pipe

__all__ = ["Pipe", "skip"]
