"""Calls of functions of pykern's, as they are counted."""

from types import CodeType

import pykern
from pykern.torch_private import bare_layers

_OURS = pykern.__file__.removesuffix("__init__.py")


def is_own(code: CodeType) -> bool:
    """Whether the function is of pykern's, and none that stands for a forward of torch's."""
    name = code.co_filename
    return name.startswith(_OURS) and name != bare_layers.__file__
