"""Sentences that people read are short."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from .test_messages import messages_of
from .test_words import FOLDERS, blocks_of, files_with_words

# Words of a sentence, or of its part up to a semicolon or colon. The aim is 25.
LONGEST = 35
LONGEST_IN_MESSAGE = 25
# The closed forms of a schedule begin with a legend of all letters, in one sentence.
LEGEND = "Closed forms"
# Targets of links, and commands and formulas in lines of their own.
NOT_WORDS = re.compile(
    r"(?<=\])\([^)]*\)|^ {4,}(?:(?:python|make|pykern|\.venv)\b|[^\n]* = )[^\n]*$", re.MULTILINE
)


def long_parts(text: str, most: int = LONGEST) -> Iterator[str]:
    """The parts of sentences that have more than so many words."""
    for paragraph in re.split(r"\n\s*\n", NOT_WORDS.sub("", text)):
        for part in re.split(r"(?<=[.!?:;])[*\")]* | \| | · ", " ".join(paragraph.split())):
            words = [word for word in part.split() if re.search(r"\w", word)]
            if len(words) > most and not part.startswith(LEGEND):
                yield f"{len(words)} words: {part}"


@pytest.mark.parametrize("folder", FOLDERS)
def test_sentences_are_short(root: Path, folder: str) -> None:
    told = [
        f"{file.relative_to(root)}: {part}"
        for file in files_with_words(root, folder)
        for block in blocks_of(file)
        for part in long_parts(block)
    ]
    assert told == []


@pytest.mark.parametrize("folder", ["pykern", "schedules"])
def test_sentences_of_messages_are_shorter(root: Path, folder: str) -> None:
    told = [
        f"{file.relative_to(root)}:{line}: {part}"
        for file in sorted((root / folder).rglob("*.py"))
        for line, message in messages_of(file)
        for part in long_parts(message, LONGEST_IN_MESSAGE)
    ]
    assert told == []


def test_a_long_sentence_is_found() -> None:
    words = " ".join(["word"] * LONGEST)
    assert not [*long_parts(f"{words}. {words}; {words}: [{words}](a/link.md)")]
    assert [*long_parts(f"A short one. {words}\nand one more, (an aside).")]
