"""A fault that is put into the sources on purpose."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Mutant(NamedTuple):
    """A text of a file, where it stands once, and what takes its place.

    Attributes:
        file: from the root.
        old: what stands there.
        new: what takes its place; nothing leaves it out.
        tests: what is run. For C++, files of tests/csrc; for Python, arguments of pytest.
        harmless: why no test can notice the fault, if none can.
    """

    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    harmless: str = ""

    @property
    def is_cpp(self) -> bool:
        """Whether its tests are those of C++."""
        return self.file.startswith("csrc/")

    @property
    def name(self) -> str:
        """The file, and the fault in one line."""
        old, new = (" ".join(text.split()) for text in (self.old, self.new))
        return f"{self.file}: {old} -> {new or 'nothing'}"

    def of(self, text: str) -> str:
        """The text of the file with the fault.

        Raises:
            ValueError: the old text does not stand there once.
        """
        if (count := text.count(self.old)) != 1:
            raise ValueError(f"{self.file} must have {self.old!r} once, got {count} times")
        return text.replace(self.old, self.new)


def mutants(file: str, tests: tuple[str, ...], *faults: Sequence[str]) -> tuple[Mutant, ...]:
    """The faults of a file that the same tests look for: old text, new text, and why harmless."""
    return tuple(Mutant(file, old, new, tests, *why) for old, new, *why in faults)


def of_runtime(*names: str) -> tuple[str, ...]:
    """Files of tests/runtime."""
    return tuple(f"tests/runtime/test_{name}.py" for name in names)
