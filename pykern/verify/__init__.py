"""Steps compared with the plain model run microbatch by microbatch. See docs/verify.md."""

from .errors import VerifyError
from .options import Verify, parse_verify
from .subject import Subject
from .verifier import Verifier

__all__ = ["Subject", "Verifier", "Verify", "VerifyError", "parse_verify"]
