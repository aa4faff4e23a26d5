"""What every format answers with: names, and where the bytes of each array lie in which file."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, BinaryIO, Literal, NoReturn

import numpy as np

from gpuq.errors import FormatError

MAX_BYTES = 2**63 - 1  # what off_t and NumPy's intp can say
_SHOWN_CHARACTERS = 80


@dataclass(frozen=True, slots=True)
class ArrayEntry:
    """Where one array lies: bytes ``[start, end)`` of the file ``path``.

    Attributes
    ----------
    name : str
        The array's name in its file; for `.npy` and raw files the file's name without suffix.
    path : str
        The file that holds the bytes; for a sharded checkpoint that is the shard.
    dtype : numpy.dtype
        A dtype NumPy can use. Where NumPy has none, that of ``ml_dtypes`` if it is installed,
        else an unsigned integer of the same size. `uint8` if `packed`.
    dtype_name : str
        The type as the file says it: ``"F32"``, ``"BF16"``, ``"<f4"``.
    shape : tuple of int
        The logical shape, in elements.
    start, end : int
        Byte offsets in the file: the first byte, and one past the last.
    order : {"C", "F"}
        Row-major or column-major.
    packed : bool
        True if an element is smaller than a byte (``F4``, ``F6_E2M3``, ``F6_E3M2``). Then `shape`
        counts elements but `dtype` is that of the bytes: allocate by `nbytes`, not by `shape`.
    """

    name: str
    path: str
    dtype: np.dtype[Any]
    dtype_name: str
    shape: tuple[int, ...]
    start: int
    end: int
    order: Literal["C", "F"] = "C"
    packed: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of the array in the file."""
        return self.end - self.start


class ArrayFile(Mapping[str, ArrayEntry]):
    """The arrays of a file by name, in the order in which the format lists them.

    Attributes
    ----------
    path : str
        The file that was opened.
    format : {"raw", "npy", "safetensors", "safetensors-index"}
        How it was read.
    size : int
        Bytes of that file; for a shard index, of all its shards together.
    metadata : Mapping
        What the file says about itself: ``__metadata__`` of safetensors (str to str),
        ``metadata`` of a shard index (str to any JSON value), else empty.
    """

    def __init__(
        self,
        path: str,
        format: str,
        size: int,
        entries: Sequence[ArrayEntry],
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        self.path = path
        self.format = format
        self.size = size
        self.metadata: Mapping[str, Any] = MappingProxyType(dict(metadata or {}))
        self._entries = {entry.name: entry for entry in entries}

    def __getitem__(self, name: str) -> ArrayEntry:
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        return f"<ArrayFile {self.path!r}: {self.format}, {len(self)} arrays, {self.size} bytes>"


@contextmanager
def open_regular(path: str) -> Iterator[tuple[BinaryIO, int]]:
    """Open a regular file for buffered reads; give it and its size in bytes."""
    with open(path, "rb", opener=_open_without_waiting) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            refuse(path, "expected a regular file, found a device, pipe or socket")
        yield file, status.st_size


def _open_without_waiting(path: str, flags: int) -> int:
    # Opening a pipe would wait for its writer; a regular file ignores the flag.
    return os.open(path, flags | os.O_NONBLOCK)


def count_bits(path: str, tensor: str | None, shape: Sequence[int], element_bits: int) -> int:
    """Bits of an array of this shape; refused beyond `MAX_BYTES`.

    Extents of 0 are left out of that check, as NumPy does when it makes an array: the
    answer may be 0 and the shape still one that no array can have.
    """
    bits = element_bits or 8
    for extent in shape:
        bits *= extent or 1
        if bits > 8 * MAX_BYTES:
            refuse(path, f"expected at most 2**63 - 1 bytes, found shape {show(shape)}", tensor)
    return 0 if element_bits == 0 or 0 in shape else bits


def dtype_name(dtype: np.dtype[Any]) -> str:
    """The spelling of `.npy` headers: ``"<f4"``; records as the list of their fields."""
    if dtype.names is not None:
        return str(dtype.descr)
    # ml_dtypes calls bfloat16 "<V2", which names another type.
    return dtype.str if np.dtype(dtype.str) == dtype else dtype.name


def refuse(path: str, reason: str, tensor: str | None = None) -> NoReturn:
    """Raise the one-line `FormatError` for a file and, where there is one, a tensor."""
    where = path if tensor is None else f"{path}: tensor {show(tensor)}"
    raise FormatError(" ".join(f"{where}: {reason}".splitlines()))


def show(value: object) -> str:
    """`repr` for a message: a file decides how long the value is, so it is cut."""
    try:
        text = repr(value)
    except ValueError:  # Python declines to print integers of more than 4300 digits
        text = f"a {type(value).__name__} with a number too long to print"
    return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "..."
