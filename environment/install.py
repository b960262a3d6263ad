"""Installs packages into the environment whose Python runs this, and ends failures in one line.

Arguments are those of `pip install`. pip shows its progress where there is a terminal, else
warnings and errors alone; what it did in full is in the log beside the environment.
"""

import subprocess
import sys
from pathlib import Path

# Texts of pip and their meanings; the first match is shown.
MEANINGS = (
    (
        ("No space left on device", "Errno 28"),
        "The disk is full: the environment and the downloads (in TMPDIR, else /tmp) did not fit. "
        "Make room, or name other places with TMPDIR and PIP_CACHE_DIR.",
    ),
    (
        ("ProxyError", "Tunnel connection failed", "Cannot connect to proxy"),
        "The proxy refuses to reach the package index: check HTTPS_PROXY.",
    ),
    (
        ("CERTIFICATE_VERIFY_FAILED", "SSLError"),
        "The package index shows a certificate that is not trusted: name one with PIP_CERT.",
    ),
    (
        (
            "NewConnectionError",
            "NameResolutionError",
            "Failed to establish a new connection",
            "Failed to resolve",
            "Network is unreachable",
            "timed out",
            "Connection refused",
        ),
        "The package index cannot be reached: check the network, or name a proxy with HTTPS_PROXY "
        "or another index with PIP_INDEX_URL.",
    ),
    (
        ("No matching distribution found",),
        "The package index lacks a package that is asked for; pip names it above.",
    ),
)


def meaning(log):
    """The line for a log of pip."""
    for signs, line in MEANINGS:
        if any(sign in log for sign in signs):
            return line
    return "pip has failed."


def main(arguments):
    """Runs pip; returns its exit status."""
    log = Path(sys.prefix, "install.log")
    log.unlink(missing_ok=True)
    # pip that writes a log draws its bars in spite of --quiet.
    options = [] if sys.stderr.isatty() else ["--quiet", "--progress-bar", "off"]
    # Most of the modules are never imported; Python compiles the others when they first are.
    options += ["--no-compile", "--log", str(log)]
    command = [sys.executable, "-m", "pip", "install", *options, *arguments]
    status = subprocess.run(command, check=False).returncode
    if status != 0:
        text = log.read_text(errors="replace") if log.exists() else ""
        print(f"{meaning(text)} (in full: {log})", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
