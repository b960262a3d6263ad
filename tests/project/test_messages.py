"""Messages of errors say what is wanted, what was given, and what to do."""

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from pykern.pipeline.combinations import REFUSED

from .test_words import offences

# Errors of a user's mistake.
KINDS = {
    "ValueError",
    "TypeError",
    "IndexError",
    "RuntimeError",
    "BadParameter",
    "BalanceError",
    "CheckpointError",
    "CutError",
    "SplitError",
}

# "heads must divide width, 15, got 2".
RULE = re.compile(r"\bmust\b.*, got\b", re.DOTALL)
# "The trace is empty. Call step first": a second sentence, which is the remedy.
REMEDY = re.compile(r"[^.]\. (?:[A-Z]|\w+ must\b)")
# "line 3: ..." around the message of another error.
AROUND = re.compile(r"^(?:\W|\w+ \{\}|\{\})*\{\}$")

# Parts of messages that are neither, and why.
ALLOWED: Mapping[str, str] = {
    "the group has been given back": "torch catches the error",
    "this part of a stage's graph has been freed": "autograd raises the error in a backward",
    "process 0 has not written the file: {}": "the error of process 0 follows",
}


def text_of(message: ast.expr) -> str:
    """The text of a message, with {} in the places of values."""
    if isinstance(message, ast.Constant):
        return str(message.value)
    if isinstance(message, ast.JoinedStr):
        return "".join(text_of(part) for part in message.values)
    if isinstance(message, ast.BinOp):
        return text_of(message.left) + text_of(message.right)
    return "{}"


def messages_of(file: Path) -> Iterator[tuple[int, str]]:
    """The messages of the errors that a file raises, with their lines."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            kind = ast.unparse(node.exc.func).rpartition(".")[2]
            if kind in KINDS:
                yield node.lineno, text_of(node.exc.args[0])


def has_form(message: str) -> bool:
    """Whether a message has the form "argument must be rule, got value", or a remedy."""
    return bool(RULE.search(message) or REMEDY.search(message) or AROUND.match(message))


def test_messages_have_the_form(root: Path) -> None:
    told = [
        f"{file.relative_to(root)}:{line}: {message}"
        for folder in ("pykern", "schedules")
        for file in sorted((root / folder).rglob("*.py"))
        for line, message in messages_of(file)
        if [*offences(message)] or not has_form(message)
        if not any(part in message for part in ALLOWED)
    ]
    assert told == []


@pytest.mark.parametrize("message", REFUSED.values(), ids=map(" and ".join, REFUSED))
def test_refused_combinations_have_the_form(message: str) -> None:
    assert has_form(message)
