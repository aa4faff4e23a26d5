"""`.npy` files: NumPy parses the header, this module holds the file to it.

Source: the specification in `numpy.lib.format` (NEP 1), versions 1.0, 2.0 and 3.0. Stricter than
`numpy.load`: bytes after the array are refused, and so is a top-level subarray dtype, which
NumPy never writes.
"""

from __future__ import annotations

import io
from pathlib import PurePath
from typing import Any, BinaryIO, Literal

import numpy as np
from numpy.lib import format as npy_format

from .entries import ArrayEntry, ArrayFile, count_bits, dtype_name, open_regular, refuse, show

MAX_HEADER_CHARACTERS = 10_000  # NumPy's own limit, for the sake of ast.literal_eval
MAX_DIMENSIONS = 64  # of NumPy 2
_LENGTH_BYTES = {1: 2, 2: 4, 3: 4}  # the header's length, little-endian, follows the magic
_MAX_UTF8_BYTES = 4

_Header = tuple[tuple[int, ...], Literal["C", "F"], np.dtype[Any]]


def open_npy(path: str) -> ArrayFile:
    """Describe the array of a `.npy` file; see `gpuq.formats.open_arrays`."""
    with open_regular(path) as (file, size):
        version, text = _read_header(path, file, size)
        start = file.tell()
    shape, order, dtype = _parse_header(path, version, text)
    _check_dtype(path, dtype)
    if len(shape) > MAX_DIMENSIONS or any(extent < 0 for extent in shape):
        refuse(path, f"expected at most {MAX_DIMENSIONS} extents >= 0, found shape {show(shape)}")
    end = start + count_bits(path, None, shape, 8 * dtype.itemsize) // 8
    if size != end:
        fault = "truncated" if size < end else "bytes after the array"
        refuse(path, f"{fault}: expected {end} bytes, found {size}")
    name = PurePath(path).stem
    entry = ArrayEntry(name, path, dtype, dtype_name(dtype), shape, start, end, order)
    return ArrayFile(path, "npy", size, [entry])


def _read_header(path: str, file: BinaryIO, size: int) -> tuple[int, bytes]:
    try:
        major, minor = npy_format.read_magic(file)
    except ValueError as error:
        refuse(path, f"expected the magic of a .npy file: {error}")
    if major not in _LENGTH_BYTES or minor != 0:
        refuse(path, f"expected version 1.0, 2.0 or 3.0, found {major}.{minor}")
    length = int.from_bytes(file.read(_LENGTH_BYTES[major]), "little")
    if length > MAX_HEADER_CHARACTERS * _MAX_UTF8_BYTES:
        expected = f"at most {MAX_HEADER_CHARACTERS} characters of header"
        refuse(path, f"expected {expected}, found {length} bytes")
    end = npy_format.MAGIC_LEN + _LENGTH_BYTES[major] + length
    text = file.read(length)
    if file.tell() != end:
        refuse(path, f"truncated in the header: expected {end} bytes or more, found {size}")
    return major, text


def _parse_header(path: str, version: int, text: bytes) -> _Header:
    # NumPy has public readers for versions 1 and 2. Version 3 is version 2 in UTF-8 instead of
    # Latin-1: with its other characters escaped, as the header is a Python literal, it is both.
    try:
        if version == 3:
            text = text.decode("utf-8").encode("ascii", "backslashreplace")
        length = len(text).to_bytes(_LENGTH_BYTES[version], "little")
        read = (
            npy_format.read_array_header_1_0 if version == 1 else npy_format.read_array_header_2_0
        )
        shape, fortran_order, dtype = read(
            io.BytesIO(length + text), max_header_size=MAX_HEADER_CHARACTERS
        )
    except Exception as error:
        # literal_eval and numpy.dtype raise whatever the damage leads them to, MemoryError and
        # RecursionError included; nothing here does I/O.
        refuse(path, f"expected a .npy header, found {type(error).__name__}: {show(str(error))}")
    return tuple(int(extent) for extent in shape), "F" if fortran_order else "C", dtype


def _check_dtype(path: str, dtype: np.dtype[Any]) -> None:
    if dtype.hasobject:
        refuse(path, f"expected plain bytes, found dtype {dtype}: objects would need pickle")
    if dtype.subdtype is not None:
        refuse(path, f"expected a dtype whose shape is in the header, found {dtype}")
