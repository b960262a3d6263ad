"""Bad input of every command is refused before torch is loaded, which takes seconds."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

# One interpreter for all of them: what loads torch is refused for that, with another message.
PROGRAM = """
import json, sys
from typer.testing import CliRunner
from pykern.cli import app

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            raise ImportError("torch is loaded")

sys.meta_path.insert(0, NoTorch())
results = [CliRunner().invoke(app, line) for line in json.load(sys.stdin)]
print(json.dumps([(result.exit_code, result.stderr) for result in results]))
"""
ABSENT = "must be a file in a folder that exists"
# Nobody may make a file there, root neither.
KEPT = "must be a file in a folder that may be written to, got /proc/"
NO_SCRIPT = "script must be a file, got none.py"
NO_MODULE = "there is no module none"
NO_BOX = "box must be one of"
NO_DEVICE = "device 'tpu' is unknown"
NO_COUNT = "a whole number of at least 1"
NO_SCHEDULE = "schedule must be one of"
REFUSED = {
    "rehearse none.py --box 4x4090": NO_SCRIPT,
    "rehearse script.py --box none": NO_BOX,
    "rehearse script.py --box 4x4090 --json none/out.json": ABSENT,
    "rehearse script.py --box 4x4090 --json /proc/out.json": KEPT,
    "rehearse script.py --box 4x4090 --steps 0": NO_COUNT,
    "profile none.py": NO_SCRIPT,
    "profile none.py --nsys step.nsys-rep": NO_SCRIPT,
    "profile script.py --nsys step": "report must end in .nsys-rep",
    "profile script.py --schedule gpipe": "--schedule must stand behind --",
    "profile none:make": NO_MODULE,
    "profile --box none": NO_BOX,
    "profile --devices tpu": NO_DEVICE,
    "profile --schedule none": NO_SCHEDULE,
    "profile --html none/out.html": ABSENT,
    "profile --html /proc/out.html": KEPT,
    "tune none:make": NO_MODULE,
    "tune none": "the model must be module:function",
    "tune --devices tpu": NO_DEVICE,
    "tune --out none/out.json": ABSENT,
    "tune --resume none/out.json": ABSENT,
    "tune --out /proc/out.json": KEPT,
    "tune --resume /proc/out.json": KEPT,
    "tune --box dgx": NO_BOX,
    "verify none:make": NO_MODULE,
    "verify --devices cpu:0": "devices must have 1 to 256 workers",
    "verify --schedule none": NO_SCHEDULE,
    "fit none:make": NO_MODULE,
    "fit --box none": NO_BOX,
    "fit --devices 8 --box a100x4": "devices must be at most 4",
    "fit --schedule none": NO_SCHEDULE,
    "nsys none.nsys-rep": "none.nsys-rep: No such file or directory",
    "nsys step.nsys-rep none.py": NO_SCRIPT,
    "nsys step script.py": "report must end in .nsys-rep",
    "nsys --trace none/out.json step.nsys-rep": ABSENT,
    "nsys none/step.nsys-rep script.py": ABSENT,
    "nsys /proc/step.nsys-rep script.py": KEPT,
    "trace none.json": "none.json: No such file or directory",
    "trace other.json": "must be a trace by torch.profiler",
    "trace --picture out.gif other.json": "must end in .png, .pdf or .svg, got 'out.gif'",
    "bench box --devices tpu": NO_DEVICE,
    "bench box --out none/out.json": ABSENT,
    "bench box --out /proc/out.json": KEPT,
    "bench compare none.json other.json": "none.json: No such file or directory",
    "bench report other.json": "must be a file of pykern bench box",
    "bench report --picture none/out.svg other.json": ABSENT,
    "demo --devices tpu": NO_DEVICE,
    "demo --schedule none": NO_SCHEDULE,
    "demo --data none.txt": "none.txt: No such file or directory",
    "demo --out other.json": "--out must be a folder",
    "scale --box none": NO_BOX,
    "scale --gpus 0": "the numbers must be",
    "plan none": NO_SCHEDULE,
    "plan none.json": "none.json: No such file or directory",
    "plan gpipe --out none/out.svg": ABSENT,
    "plan gpipe --out /proc/out.svg": KEPT,
    "schedules -p 0": NO_COUNT,
    "topo --json none/out.json": ABSENT,
    "topo --json /proc/out.json": KEPT,
    "topo --box none": NO_BOX,
}


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    """The exit code and the line of each."""
    folder = tmp_path_factory.mktemp("refused")
    Path(folder, "script.py").touch()
    Path(folder, "other.json").write_text("{}")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=folder,
        input=json.dumps([line.split() for line in REFUSED]),
        capture_output=True,
        text=True,
        check=True,
    )
    assert {path.name for path in folder.iterdir()} == {"script.py", "other.json"}
    return dict(zip(REFUSED, json.loads(done.stdout), strict=True))


@pytest.mark.parametrize("line", REFUSED)
def test_it_is_refused_without_torch(line: str, refused: dict[str, tuple[int, str]]) -> None:
    code, told = refused[line]
    assert (code, told.count("\n")) == (2, 1), told
    assert REFUSED[line] in told
