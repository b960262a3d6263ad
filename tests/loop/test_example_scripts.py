"""The scripts of docs/examples that train and predict print, run small, what they show."""

import ast
import re
import runpy
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "docs/examples"

# By name: arguments of a run that takes a second or two, and packages beside torch.
SMALL: dict[str, tuple[str, list[str]]] = {
    "nanogpt": (
        "--layers 2 --width 16 --context 16 --batch 4 --microbatches 2 --steps 2 --save-every 1 "
        "--sample 2 --autocast bfloat16",
        ["safetensors"],
    ),
    "fine_tune": (
        "--layers 2 --width 16 --rows 16 --batch 8 --microbatches 4 --steps 3",
        ["transformers", "accelerate"],
    ),
    "lora": (
        "--layers 2 --width 16 --batch 4 --microbatches 2 --steps 2",
        ["transformers", "peft"],
    ),
    "vision": ("--blocks 2 --width 4 --batch 16 --microbatches 2 --images 32 --epochs 2", []),
    "diffusion": (
        "--width 8 --size 8 --batch 4 --microbatches 2 --steps 4 --images 1 --sampling-steps 2",
        [],
    ),
    "inference": ("--layers 2 --width 16 --length 8 --batch 4 --batches 3", []),
    "gan": ("--width 8 --batch 8 --steps 4", []),
}


def script_of(name: str, packages: list[str]) -> dict[str, Any]:
    for package in packages:
        pytest.importorskip(package)
    return runpy.run_path(str(FOLDER / f"{name}.py"))


def docstring_of(name: str) -> str:
    return ast.get_docstring(ast.parse((FOLDER / f"{name}.py").read_text())) or ""


def commands_of(name: str) -> list[list[str]]:
    """The arguments of each command that the docstring shows."""
    lines = docstring_of(name).replace("\\\n", " ").splitlines()
    shown = [shlex.split(line) for line in lines if line.startswith("    python ")]
    assert [words[1] for words in shown] == [f"docs/examples/{name}.py"] * len(shown)
    return [words[2:] for words in shown]


def kinds_of_lines(printed: str) -> set[str]:
    """The lines, whatever their numbers, drawn images and texts of the model are."""
    lines = {line.strip() for line in printed.splitlines() if line.strip()}
    texts = {re.sub(r"b['\"].*|\[.*\]|[.#]{8,}", "...", line) for line in lines}
    return {re.sub(r"-?\d+(\.\d+)?", "0", line) for line in texts}


# transformers, peft and torch.export warn of calls of their own.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SMALL)
def test_a_small_run_prints_what_the_docstring_shows(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, packages = SMALL[name]
    script = script_of(name, packages)
    monkeypatch.chdir(tmp_path)
    script["main"](arguments.split())
    _, shown = docstring_of(name).split("Expected output")
    shown = shown.split("\n\n", 1)[1]
    assert kinds_of_lines(capsys.readouterr().out) == kinds_of_lines(shown)


@pytest.mark.parametrize("name", SMALL)
def test_its_commands_are_understood_and_it_is_short(name: str) -> None:
    parse = script_of(name, SMALL[name][1])["parse"]
    plain, *others = [parse(arguments) for arguments in commands_of(name)]
    assert plain.devices == "cpu:2"
    assert others[-1].devices == "cuda"
    assert len((FOLDER / f"{name}.py").read_text().splitlines()) < 150


def test_nanogpt_goes_on_with_another_number_of_stages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments, packages = SMALL["nanogpt"]
    main = script_of("nanogpt", packages)["main"]
    monkeypatch.chdir(tmp_path)
    main(arguments.split())
    wanted = torch.load("nanogpt-out/model.pt")
    rest = "--resume nanogpt-out/step-1.ckpt --devices cpu:3 --out again"
    main([*arguments.split(), *rest.split()])
    found = torch.load("again/model.pt")
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
