"""Plans as files: JSON with a header, and the CSV of torch.distributed.pipelining.

Files are untrusted: a file that does not hold a runnable plan is refused, and the message names
file, place and value. A plan's file does not name the model or machine that the plan is for.
"""

import os
from pathlib import Path

from pykern._C import Costs, Plan
from pykern.plan.files.json_form import from_json, to_json
from pykern.plan.files.proved import MAX_ACTIONS, require_count
from pykern.plan.files.torch_csv import from_torch_csv, to_torch_csv
from pykern.replacing import replacing

__all__ = [
    "SUFFIXES",
    "load_plan",
    "load_plan_and_costs",
    "load_torch_csv",
    "save_plan",
    "save_torch_csv",
]

SUFFIXES = (".json", ".csv")

# The largest file that is parsed; a plan of a million actions takes a little more than half of it.
MAX_FILE_BYTES = 1 << 24


def save_plan(
    plan: Plan,
    path: str | os.PathLike[str],
    *,
    costs: Costs | None = None,
    transfers: bool = False,
) -> None:
    """Writes a plan that `load_plan` reads back as the same plan.

    Args:
        plan: A plan that passes `check`. A .csv holds F, B, I and W of one replica and one slice.
        path: .json, or .csv for torch's runtime; an existing file is replaced atomically.
        costs: The costs that the plan was made for; only a .json keeps them.
        transfers: Whether a .csv holds sends and receives as well, each receive right before its
            reader or the first transfer that must follow it. Torch reads the form with transfers
            as "compute_comms" and the form without them as "compute_only". From torch 2.15 on
            "compute_comms" has waits as well, which an older torch cannot read; the file has waits
            if the installed torch is that new.

    Raises:
        TypeError: `plan` is not a plan, or `costs` are not costs.
        ValueError: The plan cannot run, the costs are not for it, the suffix is another, or the
            format cannot express the plan; or the file would be larger than 16 MiB or hold more
            than 2**20 actions.
        OSError: The file cannot be written.
    """
    target = Path(path)
    suffix = suffix_of(target)
    if not isinstance(plan, Plan):
        raise TypeError(
            f"plan must be a Plan, got a {type(plan).__name__}. Make one, such as by "
            "pykern.schedules.gpipe(4, 8)"
        )
    if costs is not None and not isinstance(costs, Costs):
        raise TypeError(
            f"costs must be Costs or None, got a {type(costs).__name__}. Give "
            "Costs(forward_ns, backward_ns)"
        )
    require_count("actions", plan.num_actions, MAX_ACTIONS)
    if suffix == ".json":
        if transfers:
            raise ValueError(f"transfers must be written into a .csv, got {target}")
        text = to_json(plan, costs)
    else:
        if costs is not None:
            raise ValueError(f"costs must be kept in a .json, got {target}")
        text = to_torch_csv(plan, transfers=transfers)
    write_text(target, text)


def save_torch_csv(plan: Plan, path: str | os.PathLike[str], *, transfers: bool = False) -> None:
    """Writes a plan as torch's CSV, as `save_plan` does, into a file of any name.

    Raises:
        ValueError: For the same reasons as `save_plan`.
        OSError: The file cannot be written.
    """
    require_count("actions", plan.num_actions, MAX_ACTIONS)
    write_text(Path(path), to_torch_csv(plan, transfers=transfers))


def load_torch_csv(path: str | os.PathLike[str]) -> Plan:
    """Reads torch's CSV, as `load_plan` does, from a file of any name.

    Raises:
        ValueError: For the same reasons as `load_plan`.
        OSError: The file cannot be read.
    """
    text = read_text(Path(path))
    try:
        return from_torch_csv(text)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def load_plan(path: str | os.PathLike[str]) -> Plan:
    """Reads a plan, and proves that it can run.

    Args:
        path: .json as `save_plan` writes it, or .csv of this project or of torch, with or without
            sends and receives. Sends and receives must pair up and are then left out; waits,
            bubbles and torch's actions for sharded parameters are left out too.

    Returns:
        The plan.

    Raises:
        ValueError: The file does not hold a plan, or the plan breaks a rule; the cause of the error
            is then a `PlanError`. The message names file, place and value.
        OSError: The file cannot be read.
    """
    return load_plan_and_costs(path)[0]


def load_plan_and_costs(path: str | os.PathLike[str]) -> tuple[Plan, Costs | None]:
    """Reads a plan, and the costs that were saved with it.

    Args:
        path: A file as for `load_plan`.

    Returns:
        The plan, and its costs; None if the file holds no costs.

    Raises:
        ValueError: For the same reasons as `load_plan`.
        OSError: The file cannot be read.
    """
    source = Path(path)
    if suffix_of(source) == ".csv":
        return load_torch_csv(source), None
    text = read_text(source)
    try:
        return from_json(text)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from error


def suffix_of(path: Path) -> str:
    """The suffix of the file, which tells its format."""
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise ValueError(f"a plan's file name must end in .json or .csv, got {str(path)!r}")
    return suffix


def read_text(path: Path) -> str:
    """The text of the file, which must be a regular file of bounded size, in ASCII."""
    if path.exists() and not path.is_file():
        raise ValueError(f"path must be a regular file, got {path}")
    data = read_bytes(path)
    if not data.isascii():
        offset = next(offset for offset, byte in enumerate(data) if byte > 127)
        raise ValueError(f"{path} must be ASCII, got byte {data[offset]} at offset {offset}")
    return data.decode("ascii")


def read_bytes(path: Path) -> bytes:
    """The bytes of the file, whose size is bounded."""
    with path.open("rb") as file:
        data = file.read(MAX_FILE_BYTES + 1)
    require_size(path, len(data))
    return data


def write_text(path: Path, text: str) -> None:
    """Replaces a file atomically."""
    data = text.encode("ascii")
    require_size(path, len(data))
    with replacing(path) as partial:
        partial.write_bytes(data)


def require_size(path: Path, size: int) -> None:
    """Refuses to write or parse more than the limit."""
    if size > MAX_FILE_BYTES:
        raise ValueError(f"{path} must have at most {MAX_FILE_BYTES} bytes, got more")
