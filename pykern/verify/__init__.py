"""Steps compared with the plain model run microbatch by microbatch. See docs/verify.md."""

from .errors import VerifyError
from .options import Verify, parse_verify
from .verifier import open_verify

__all__ = ["Verify", "VerifyError", "open_verify", "parse_verify"]
