"""Sentences that people read begin with the thing that they are about."""

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

FOLDERS = ["", "docs", "pykern", "schedules", "csrc", "tests", "bench"]

# Words at the beginning of a sentence behind which its subject is a riddle.
RIDDLE = re.compile(r"(Who|Whoever|Whose|What|Whatever|Of|That of|Those of)\b")
# Plain words are "nothing is left" and "is not a file". "There is no file" and "is no longer" are
# plain words as well.
NONE = re.compile(
    r"\b(is|are|was|were) none\b"
    r"|(?<![Tt]here )\b(is|are|was|were) no (?!longer|more|less|\w+er\b)"
)


def offences(text: str) -> Iterator[str]:
    """The sentences of a block of text that begin with a `RIDDLE` or have a `NONE` in them."""
    for sentence in re.split(r"(?<=[.!?:]) ", re.sub(r"\s+", " ", text).strip(" *-")):
        opening = RIDDLE.match(sentence.lstrip("*"))
        if (opening and not sentence.endswith("?")) or NONE.search(sentence):
            yield sentence


def blocks_of_page(text: str) -> Iterator[str]:
    """The paragraphs, items and table rows of a page, without headings and code."""
    text = re.sub(r"^ *```[^`\n]*\n(?:.*\n)*?^ *```$|^#+ .*$", "", text, flags=re.MULTILINE)
    for block in re.split(r"\n\s*\n|\n\s*(?:[-*|]|\d+\.) ", text):
        yield re.sub(r"^[\s|*-]+", "", block)


def blocks_of_source(text: str) -> Iterator[str]:
    """The docstrings, each argument apart, and comments of a Python file."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node) or ""
            for block in re.split(r"\n\s*\n|\n(?=\s*\*{0,2}\w+: )", docstring):
                yield re.sub(r"^\s*\w+: (?=[A-Z])", "", block)
    yield from comments_of(text, "#")


def blocks_of_notebook(text: str) -> Iterator[str]:
    """The paragraphs of a notebook."""
    for cell in json.loads(text)["cells"]:
        if cell["cell_type"] == "markdown":
            yield from blocks_of_page("".join(cell["source"]))


def strings_of(file: Path) -> Iterator[str]:
    """The texts in the code of a file: messages, help, docstrings of the extension."""
    if file.suffix == ".py":
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value
    else:
        for literals in re.findall(r'"[^"\n]*"(?:\s*"[^"\n]*")*', file.read_text()):
            yield re.sub(r'"\s*"', "", literals).strip('"')


def comments_of(text: str, mark: str) -> Iterator[str]:
    """The comments that have lines of their own."""
    for comment in re.finditer(rf"(?:^[ ]*{mark}[^\n]*\n)+", text, re.MULTILINE):
        yield re.sub(rf"^\s*{mark}+ ?", "", comment[0], flags=re.MULTILINE)


def blocks_of(file: Path) -> Iterator[str]:
    text = file.read_text()
    if file.suffix == ".md":
        return blocks_of_page(text)
    if file.suffix == ".ipynb":
        return blocks_of_notebook(text)
    return blocks_of_source(text) if file.suffix == ".py" else comments_of(text, "//")


def files_with_words(root: Path, folder: str) -> Iterator[Path]:
    """The pages and sources of a folder with all below it, or of the root alone."""
    endings = {".md", ".ipynb", ".py", ".cpp", ".hpp", ".cu", ".cuh"}
    files = (root / folder).rglob("*") if folder else root.glob("*")
    yield from sorted(file for file in files if file.suffix in endings)


@pytest.mark.parametrize("folder", FOLDERS)
def test_sentences_begin_with_their_subject(root: Path, folder: str) -> None:
    told = [
        f"{file.relative_to(root)}: {sentence}"
        for file in files_with_words(root, folder)
        for block in blocks_of(file)
        for sentence in offences(block)
    ]
    assert told == []


@pytest.mark.parametrize("folder", ["pykern", "schedules", "csrc", "docs"])
def test_sentences_in_code_begin_with_their_subject(root: Path, folder: str) -> None:
    told = [
        f"{file.relative_to(root)}: {sentence}"
        for file in sorted((root / folder).rglob("*"))
        if file.suffix in {".py", ".cpp", ".hpp"}
        for text in strings_of(file)
        for sentence in offences(text)
    ]
    assert told == []


@pytest.mark.parametrize(
    "text",
    [
        "What is trained.",
        "One thing. Of each pipeline.",
        "Whoever waits, fails.",
        "The rest is none.",
        "The file is no report.",
    ],
)
def test_a_sentence_without_a_subject_is_found(text: str) -> None:
    assert [*offences(text)]


@pytest.mark.parametrize("text", ["There is no file.", "It is no longer there.", "What is it?"])
def test_plain_sentences_are_left_alone(text: str) -> None:
    assert not [*offences(text)]
