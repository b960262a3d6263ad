"""Shared by the benchmarks: one option, a few fixtures, and the report at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from .harness import Record
from .report import Environment, environment, save, tables

_RESULTS = Path(__file__).with_name("results")
_records = pytest.StashKey[list[Record]]()
_header = pytest.StashKey[Environment]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--save-results",
        action="store_true",
        help="write a results file per claim into bench/results/",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    # Its own table would show whole rounds, in which all contenders run.
    config.option.benchmark_quiet = True
    config.stash[_records] = []
    config.stash[_header] = environment(f"pytest {' '.join(config.invocation_params.args)}")


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    records = config.stash[_records]
    if not records:
        return
    terminalreporter.section("benchmarks")
    for key, value in config.stash[_header].items():
        terminalreporter.write_line(f"{key}: {value}")
    terminalreporter.write(tables(records))
    if config.getoption("save_results"):
        for path in save(_RESULTS, config.stash[_header], records):
            terminalreporter.write_line(f"wrote {path.relative_to(_RESULTS.parents[1])}")


@pytest.fixture(autouse=True)
def _restore_threads() -> Iterator[None]:
    """Contenders set the number of torch's intra-op threads for themselves."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def smoke(pytestconfig: pytest.Config) -> bool:
    """Whether benchmarks only have to run and be right: tiny sizes, nothing measured."""
    return bool(pytestconfig.getoption("benchmark_disable"))


@pytest.fixture
def report(
    benchmark: BenchmarkFixture, pytestconfig: pytest.Config
) -> Callable[[list[Record]], None]:
    """Takes the records of a case for the table, the results file and pytest-benchmark's JSON."""

    def take(records: list[Record]) -> None:
        pytestconfig.stash[_records] += records
        benchmark.extra_info["contenders"] = [asdict(record) for record in records]

    return take
