"""The table of deliberate faults fits the sources; `python -m tests.mutate` runs it."""

import pytest

from tests.mutate.__main__ import MUTANTS, ROOT, is_as_said, kept
from tests.mutate.mutant import Mutant


def test_each_fault_is_at_one_place() -> None:
    for mutant in MUTANTS:
        assert mutant.of((ROOT / mutant.file).read_text())
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 80


def test_the_tests_of_each_fault_are_there() -> None:
    for mutant in MUTANTS:
        folder = ROOT / "tests/csrc" if mutant.is_cpp else ROOT
        files = [name for name in mutant.tests if not name.startswith("-")]
        assert files
        assert all((folder / name).is_file() for name in files), mutant.name


def test_outcomes_are_as_the_table_says() -> None:
    outcomes = kept()
    for mutant in MUTANTS:
        if mutant.name in outcomes:
            assert is_as_said(outcomes[mutant.name]["outcome"], mutant), mutant.name


def test_a_text_that_is_not_there_once_is_no_fault() -> None:
    mutant = Mutant("csrc/a.cpp", "old", "new", ())
    assert mutant.of("an old one") == "an new one"
    for text in ("none", "old and old"):
        with pytest.raises(ValueError, match="must have 'old' once, got"):
            mutant.of(text)
