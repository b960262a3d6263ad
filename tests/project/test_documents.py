"""The examples of the documents work."""

import json
import pkgutil
import re
import runpy

import pytest
import torch
from torch import nn
from typer.main import get_command

import pykern
from pykern.cli import app
from pykern.plan.files.json_form import from_json, to_json
from pykern.schedules import one_f_one_b


def blocks(page, language="python"):
    """The fenced blocks of a page that are in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.M | re.S)


def assert_prints_what_it_shows(page, capsys):
    """The code of a page runs, and prints the page's texts."""
    exec(compile("".join(blocks(page)), page.name, "exec"), {})
    assert capsys.readouterr().out == "".join(blocks(page, "text"))


# A minute and a half on a machine whose cores are shared by ten others; the next, three.
@pytest.mark.timeout(300)
def test_the_readmes_code_runs(python, root):
    code = blocks(root / "README.md")
    assert len(code) == 2
    # On a busy machine a measured balance warns.
    quiet = ("-W", "error", "-W", "ignore:the times of layers differ")
    output = python(*quiet, "-c", "".join(code)).stdout
    assert "torch.Size([1024, 512])" in output
    assert "share of time" in output


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["your-own-schedule.md", "recompute.md"])
def test_what_a_guide_shows_runs_and_prints_what_it_shows(python, root, name):
    page = root / "docs" / name
    printed = python("-W", "error", "-c", "".join(blocks(page))).stdout
    assert printed == "".join(blocks(page, "text"))


@pytest.mark.parametrize(
    "name",
    [
        *("choose-a-split.md", "from-device-map.md", "from-deepspeed.md", "asynchronous.md"),
        *("verify.md", "loss-outside.md", "from-torchgpipe.md", "memory.md"),
        *("troubleshooting.md", "search.md", "published-rates.md"),
    ],
)
def test_what_a_guide_shows_runs_here_and_prints_what_it_shows(root, name, capsys):
    assert_prints_what_it_shows(root / "docs" / name, capsys)


# peft asks for names that transformers is about to rename.
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_the_page_on_adapters_runs_and_prints_what_it_shows(root, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert_prints_what_it_shows(root / "docs/adapters.md", capsys)


# torch 2.12 says so of each profile.
@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events:UserWarning")
def test_the_page_on_profiling_runs(root, tmp_path, monkeypatch, capsys):
    page = root / "docs/profiling.md"
    profile, timeline, of_torch = blocks(page)
    monkeypatch.chdir(tmp_path)
    exec(profile, {})
    assert (tmp_path / "step.html").exists()
    told = re.findall(r"^\| ([a-z -]+) \| the ", page.read_text().split("**Devices.**")[0], re.M)
    printed = capsys.readouterr().out
    assert len(told) == 8
    # Whether threads compete depends on the machine, and the host waits for GPUs alone.
    of_machines = {"competing threads", "host synchronisation"}
    assert {cause for cause in told if cause not in printed} <= of_machines
    exec(timeline, {})
    events = json.loads((tmp_path / "step.trace.json").read_text())["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == 2 * 2 * 4 * 8
    # The block counts the operators of its workers itself.
    exec(of_torch, {})


def test_the_page_on_checkpoints_runs_and_prints_what_it_shows(root, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert_prints_what_it_shows(root / "docs/checkpoints.md", capsys)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("model.safetensors", "run.ckpt", "run.dcp"),
    ]


# A minute where ten others share the cores: it measures until times settle.
@pytest.mark.timeout(300)
def test_the_page_on_tuning_runs(root, tmp_path, monkeypatch, capsys):
    (code,) = blocks(root / "docs/tuning.md")
    monkeypatch.chdir(tmp_path)
    names = {
        **{"pykern": pykern, "F": nn.functional, "x": torch.randn(64, 8)},
        **{"y": torch.randint(8, (64,)), "model": nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))},
    }
    exec(code, names)
    assert "plans simulated, 6 run" in capsys.readouterr().out
    assert isinstance(names["pipe"], pykern.Pipeline)
    assert (tmp_path / "plan.json").exists()


def test_the_first_hour_runs_and_prints_what_it_shows(root, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    try:
        assert_prints_what_it_shows(root / "docs/first-hour.md", capsys)
    finally:
        torch.set_num_threads(threads)


def test_the_pages_of_the_catalogue_are_what_the_code_gives(root):
    made = runpy.run_path(str(root / "docs/make_schedules.py"))["made"]()
    stale = [
        name
        for name, content in made.items()
        if not (root / "docs" / name).exists() or (root / "docs" / name).read_text() != content
    ]
    assert stale == [], "run python docs/make_schedules.py"
    pictures = {f"schedules/{path.name}" for path in (root / "docs/schedules").iterdir()}
    assert pictures == made.keys() - {"schedules.md"}


def test_the_page_of_commands_is_what_the_commands_say(root):
    made = runpy.run_path(str(root / "docs/make_commands.py"))["made"]()
    assert made == (root / "docs/commands.md").read_text(), "run python docs/make_commands.py"
    told = re.findall(r"^## `pykern (\w+)`$", made, re.MULTILINE)
    assert sorted(told) == sorted(vars(get_command(app))["commands"])


def test_the_plan_shown_as_a_file_is_one(root):
    (shown,) = blocks(root / "docs/plan-files.md", "json")
    assert shown == to_json(one_f_one_b(2, 2))
    assert from_json(shown) == (one_f_one_b(2, 2), None)


def anchors_of(page):
    """The headings of a page, as links name them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.M)
    return {re.sub(r"[^\w -]", "", each).lower().replace(" ", "-") for each in headings}


def test_links_between_documents_lead_to_files_and_headings(root):
    documents = [*root.glob("*.md"), *root.glob("*/*.md"), *root.glob("docs/*/*.md")]
    broken = []
    for document in documents:
        if ".venv" in document.parts or "build" in document.parts:
            continue
        for link in re.findall(r"\]\(([^):\s]+)\)", document.read_text()):
            path, _, anchor = link.partition("#")
            page = document.parent / path if path else document
            if not page.is_file() or (anchor and anchor not in anchors_of(page)):
                broken.append(f"{document.relative_to(root)}: {link}")
    assert broken == []


@pytest.mark.skipif(torch.__version__ < "2.13", reason="pykern.interop.pipelining needs it")
def test_names_in_the_pages_exist(root):
    """A page called a module, and another a method that timelines do not have."""
    of_a_timeline = r"`(?:measured|predicted|pipe\.(?:timeline|prediction)\(\))\.(\w+)"
    unknown = []
    for page in [root / "README.md", *root.glob("docs/*.md")]:
        text = page.read_text()
        unknown += [
            f"{page.name}: a timeline's {name}"
            for name in re.findall(of_a_timeline, text)
            if not hasattr(pykern.plan.Timeline, name)
        ]
        for name, called in re.findall(r"`(pykern(?:\.\w+)+)(\(?)", text):
            found = pkgutil.resolve_name(name)
            if called and not callable(found):
                unknown.append(f"{page.name}: {name} cannot be called")
    assert unknown == []


def test_the_readme_is_read_in_minutes(root):
    assert len((root / "README.md").read_text().splitlines()) <= 120


def test_the_reading_path_is_short(root):
    """A newcomer understands a step from the files of the first paragraph, read in an hour."""
    page = (root / "ARCHITECTURE.md").read_text()
    path = page.split("## Reading path\n\n")[1].split("\n\n")[0]
    files = re.findall(r"\]\(([\w/.]+)\)", path)
    assert files[0] == "schedules/gpipe.py"
    assert "pykern/runtime/stage/backward.py" in files
    lines = {name: len((root / name).read_text().splitlines()) for name in files}
    assert sum(lines.values()) < 1500, lines
