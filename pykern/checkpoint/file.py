"""The file: safetensors, with an index in its metadata that describes each tensor.

The index is JSON: a header, dtype, shape and SHA-256 of every tensor, the parts of the run, and its
own SHA-256. safetensors itself proves that tensors and bytes of the file match one to one.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

try:
    from safetensors import SafetensorError, safe_open
    from safetensors.torch import save_file
except ImportError as error:
    raise ImportError(
        "checkpoints need safetensors. Install it with pip install 'pykern-runtime[checkpoint]'"
    ) from error

from ..notes import add_note
from ..plan.files.json_form import checksum, require_equal, require_object
from ..plan.files.strict_json import MAX_VALUES, decoded, read_json, require_plausible, shown
from ..replacing import replacing
from ..tensors.dtensor import is_dtensor, whole
from .errors import CheckpointError
from .form import described

FORMAT = "pykern-checkpoint"
VERSION = 1
# The dtypes that safetensors and torch both have.
DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.bool),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
    *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz),
)
PARTS = ("model", "grads", "optimizer", "scheduler", "scaler", "rng", "extra")
HEADER = ("format", "version", "tensors", "sha256")

# The index's key in the metadata; another entry tells other programs that the tensors are torch's.
INDEX = "pykern"
# A safetensors file begins with the length of its header, at most `_MAX_HEADER_BYTES`.
_LENGTH = struct.Struct("<Q")
_MAX_HEADER_BYTES = 100_000_000
METADATA = {"format": "pt"}
# The key in a safetensors header that does not name a tensor.
_NOT_A_TENSOR = "__metadata__"


class Tensors:
    """The tensors of a checkpoint on their way into the file, each under a name of its own."""

    def __init__(self) -> None:
        self.by_key: dict[str, Tensor] = {}
        self._storages: set[int] = set()

    def add(self, name: str, tensor: Tensor) -> str:
        """Takes a tensor from any device, and returns the tensor's name in the file.

        The parts of a DTensor are gathered, by a collective of the processes that have the parts.

        Raises:
            CheckpointError: safetensors does not support this kind of tensor.
        """
        require_storable(name, tensor)
        # safetensors' names are UTF-8, which has no lone surrogates.
        name = name.encode(errors="backslashreplace").decode()
        host = whole(tensor).cpu().resolve_conj().resolve_neg().contiguous()
        if host.untyped_storage().data_ptr() in self._storages:
            host = host.clone()
        self._storages.add(host.untyped_storage().data_ptr())
        while name in self.by_key or name == _NOT_A_TENSOR:
            name += "~"
        self.by_key[name] = host
        return name


def require_storable(name: str, tensor: object) -> None:
    """Refuses all but plain, dense tensors with values, of a dtype that safetensors supports."""
    if type(tensor) not in (Tensor, torch.nn.Parameter) and not is_dtensor(tensor):
        raise CheckpointError(
            f"{name} must be a plain tensor, got a {type(tensor).__name__}. If it is frozen, save "
            "nn.ParameterList(p for p in model.parameters() if p.requires_grad) alone"
        )
    assert isinstance(tensor, Tensor)
    if tensor.layout != torch.strided or tensor.is_meta:
        kind = "on the meta device" if tensor.is_meta else str(tensor.layout)
        raise CheckpointError(
            f"{name} must be a dense tensor with values, got one that is {kind}. Leave it out of "
            "the checkpoint"
        )
    if tensor.dtype not in DTYPES:
        raise CheckpointError(
            f"{name} must have a dtype that safetensors supports, got {described(tensor)}. Save it "
            "as another dtype"
        )


def write(path: Path, parts: dict[str, Any], tensors: Tensors) -> None:
    """Writes the file atomically: readers find the former file or the complete new one.

    Args:
        path: a file name in a folder that exists.
        parts: a value of JSON for each of `PARTS`.
        tensors: the tensors that the parts refer to.

    Raises:
        CheckpointError: the path is a folder, or the parts hold more than `reading` takes.
        OSError: the file cannot be written.
    """
    if path.is_dir():
        raise CheckpointError(f"path must be a file, got the folder {path}. Name a file in it")
    index = {
        "format": FORMAT,
        "version": VERSION,
        "tensors": {key: _entry(tensor) for key, tensor in tensors.by_key.items()},
        **parts,
    }
    index["sha256"] = checksum(index)
    text = json.dumps(index, separators=(",", ":"), allow_nan=False)
    try:
        require_plausible(text, MAX_VALUES)
    except ValueError as error:
        raise CheckpointError(
            f"the parts must fit in a file that can be read again, got {path}: {error}"
        ) from None
    metadata = METADATA | {INDEX: text}
    with replacing(path) as file:
        try:
            save_file(tensors.by_key, file, metadata)
        except SafetensorError as error:
            raise _not_written(path, error) from error


def _not_written(path: Path, error: SafetensorError) -> OSError:
    """The operating system's error, from the text of safetensors' error."""
    if found := re.search(r"\(os error (\d+)\)", str(error)):
        number = int(found[1])
        return OSError(number, os.strerror(number), str(path))
    return OSError(f"{path} cannot be written: {error}")


class Saved:
    """A checkpoint that is being read.

    Attributes:
        parts: the JSON of each of `PARTS`; undamaged, but of any form.
    """

    def __init__(self, file: Any) -> None:
        self._file = file
        index = _index_of(file.metadata())
        self.parts = {part: index[part] for part in PARTS}
        self._entries = index["tensors"]
        self._read: dict[str, Tensor] = {}
        if not isinstance(self._entries, dict) or self._entries.keys() != set(file.keys()):
            raise CheckpointError(
                "the index must name the tensors that the file holds, got other names. The file "
                "is damaged"
            )

    def tensor(self, key: str) -> Tensor:
        """The tensor on the CPU, checked against its SHA-256.

        Each call for a key returns the same object.
        """
        if key not in self._entries:
            raise CheckpointError(
                f"the file must hold tensor {shown(key)}, got a file without it. The file is "
                "damaged"
            )
        if key not in self._read:
            tensor = self._file.get_tensor(key)
            if self._entries[key] != _entry(tensor):
                raise CheckpointError(
                    f"tensor {shown(key)} is not as it was saved. The file is damaged"
                )
            self._read[key] = tensor
        return self._read[key]


@contextmanager
def reading(path: Path) -> Iterator[Saved]:
    """Opens an untrusted file; errors raised in the block are reported as errors of this file.

    Raises:
        CheckpointError: the file is not a checkpoint, or is damaged.
        OSError: the file cannot be opened or read.
    """
    if path.exists() and not path.is_file():
        raise CheckpointError(f"path must be a regular file, got {path}")
    try:
        # Both readers use one handle and copy the tensors: other writers of the path or the file
        # cannot change a tensor meanwhile.
        with path.open("rb") as raw:
            try:
                _require_keys_once(raw)
            except ValueError as error:
                raise _not_one(path, error) from error
            with safe_open(
                f"/proc/self/fd/{raw.fileno()}", framework="pt", backend="pread"
            ) as file:
                yield Saved(file)
    except CheckpointError as error:
        add_note(error, f"checkpoint: {path}")
        raise
    except SafetensorError as error:
        raise _not_one(path, error) from error


def _not_one(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(f"{path} is not a checkpoint, or a damaged one: {error}")


def _require_keys_once(raw: BinaryIO) -> None:
    """Refuses a header that repeats a key, because safetensors silently keeps one of the values.

    Raises:
        ValueError: the header repeats a key, or is not a header.
    """
    start = raw.read(_LENGTH.size)
    if len(start) < _LENGTH.size:
        raise ValueError(f"a file must have at least {_LENGTH.size} bytes, got {len(start)}")
    (length,) = _LENGTH.unpack(start)
    if length > _MAX_HEADER_BYTES:
        raise ValueError(f"a header must have at most {_MAX_HEADER_BYTES} bytes, got {length}")
    read_json(decoded(raw.read(length)), max_values=MAX_VALUES)


def _index_of(metadata: dict[str, str] | None) -> dict[str, Any]:
    if metadata is None or INDEX not in metadata:
        raise CheckpointError("the file must be one that pykern.checkpoint.save wrote, got another")
    try:
        require_equal("metadata", metadata, METADATA | {INDEX: metadata[INDEX]})
        index: dict[str, Any] = read_json(metadata[INDEX], max_values=MAX_VALUES)
        require_object("the index", index, FORMAT, VERSION, HEADER + PARTS)
        require_equal("sha256", index["sha256"], checksum(index))
    except ValueError as error:
        raise CheckpointError(
            f"the index must be as it was saved, got a changed one: {error}"
        ) from error
    return index


def _entry(tensor: Tensor) -> dict[str, Any]:
    return {
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "sha256": digest(tensor),
    }


def digest(tensor: Tensor) -> str:
    """SHA-256 of the bytes of a tensor on the CPU, row by row."""
    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(data.data).hexdigest()
