"""`.safetensors` files, by the letter of the format.

Source: https://github.com/huggingface/safetensors#format and `Metadata::validate` of the package.
Where the two differ the stricter one counts. Refused here, taken by the package (0.8.0): spaces
before the ``{``, duplicate keys, ``"__metadata__": null``, an entry written as a list or a dtype
as an object, and shapes that hold no bytes but that no NumPy array can have. Keys that a
tensor's entry does not need are ignored, as the package ignores them.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any, BinaryIO, TypeGuard

import numpy as np

from .entries import ArrayEntry, ArrayFile, count_bits, open_regular, refuse, show
from .strict_json import parse_object

MAX_HEADER_BYTES = 100_000_000  # MAX_HEADER_SIZE of the package
_LENGTH_BYTES = 8

# Little-endian, by definition of the format.
_NUMPY = {
    "BOOL": "?", "U8": "u1", "I8": "i1", "U16": "<u2", "I16": "<i2", "U32": "<u4", "I32": "<i4",
    "U64": "<u8", "I64": "<i8", "F16": "<f2", "F32": "<f4", "F64": "<f8", "C64": "<c8",
}  # fmt: skip
_RAW_AND_ML_DTYPES = {
    "BF16": ("<u2", "bfloat16"),
    "F8_E4M3": ("u1", "float8_e4m3fn"),
    "F8_E4M3FNUZ": ("u1", "float8_e4m3fnuz"),
    "F8_E5M2": ("u1", "float8_e5m2"),
    "F8_E5M2FNUZ": ("u1", "float8_e5m2fnuz"),
    "F8_E8M0": ("u1", "float8_e8m0fnu"),
}
# The types ml_dtypes has for these take a whole byte for each element: not what the file holds.
_PACKED_BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
DTYPE_NAMES = frozenset(_NUMPY) | frozenset(_RAW_AND_ML_DTYPES) | frozenset(_PACKED_BITS)


def open_safetensors(path: str) -> ArrayFile:
    """Describe the tensors of a `.safetensors` file; see `gpuq.formats.open_arrays`."""
    with open_regular(path) as (file, size):
        header = parse_object(path, _read_header(path, file, size))
        data_start = file.tell()
    metadata = _checked_metadata(path, header.pop("__metadata__", {}))
    entries = [_entry(path, name, fields, data_start) for name, fields in header.items()]
    entries.sort(key=lambda entry: (entry.start, entry.end))
    _check_cover(path, entries, data_start, size)
    return ArrayFile(path, "safetensors", size, entries, metadata)


def _read_header(path: str, file: BinaryIO, size: int) -> bytes:
    if size < _LENGTH_BYTES:
        refuse(path, f"truncated: expected {_LENGTH_BYTES} bytes or more, found {size}")
    length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
    if length > MAX_HEADER_BYTES:
        refuse(path, f"expected at most {MAX_HEADER_BYTES} bytes of header, found {length}")
    if length > size - _LENGTH_BYTES:
        end = _LENGTH_BYTES + length
        refuse(path, f"truncated in the header: expected {end} bytes or more, found {size}")
    text = file.read(length)
    if not text.startswith(b"{"):
        refuse(path, f"expected a header that begins with '{{', found {text[:1]!r}")
    return text


def _checked_metadata(path: str, metadata: Any) -> dict[str, str]:
    if not isinstance(metadata, dict):
        refuse(path, f"__metadata__: expected an object, found {show(metadata)}")
    for key, value in metadata.items():
        if not isinstance(value, str):
            refuse(path, f"__metadata__[{show(key)}]: expected a string, found {show(value)}")
    return metadata


def _entry(path: str, name: str, fields: Any, data_start: int) -> ArrayEntry:
    if not isinstance(fields, dict):
        refuse(path, f"expected an object, found {show(fields)}", name)
    dtype_name, shape, offsets = (fields.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype_name, str) or dtype_name not in DTYPE_NAMES:
        known = ", ".join(sorted(DTYPE_NAMES))
        refuse(path, f"dtype: expected one of {known}, found {show(dtype_name)}", name)
    if not _is_naturals(shape):
        refuse(path, f"shape: expected a list of integers >= 0, found {show(shape)}", name)
    if not _is_naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        expected = "two integers, begin <= end"
        refuse(path, f"data_offsets: expected {expected}, found {show(offsets)}", name)

    dtype, element_bits = _element(dtype_name)
    bits = count_bits(path, name, shape, element_bits)
    if bits % 8:
        refuse(path, f"expected whole bytes, found {bits} bits of {dtype_name}", name)
    begin, end = offsets
    if end - begin != bits // 8:
        expected = f"{bits // 8} bytes for {show(shape)} of {dtype_name}"
        refuse(path, f"data_offsets: expected {expected}, found {end - begin}", name)
    return ArrayEntry(
        name=name,
        path=path,
        dtype=dtype,
        dtype_name=dtype_name,
        shape=tuple(shape),
        start=data_start + begin,
        end=data_start + end,
        packed=element_bits < 8,
    )


def _is_naturals(value: Any) -> TypeGuard[list[int]]:
    # type(), because True is an int to isinstance
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


@cache
def _element(dtype_name: str) -> tuple[np.dtype[Any], int]:
    """The dtype to use for a type of the format, and the bits of one element in the file."""
    if dtype_name in _PACKED_BITS:
        return np.dtype(np.uint8), _PACKED_BITS[dtype_name]
    if dtype_name in _NUMPY:
        dtype = np.dtype(_NUMPY[dtype_name])
    else:
        raw, ml_name = _RAW_AND_ML_DTYPES[dtype_name]
        dtype = np.dtype(_ml_dtypes().get(ml_name, raw))
    return dtype, 8 * dtype.itemsize


def _ml_dtypes() -> dict[str, Any]:
    """What the optional package `ml_dtypes` has; older ones have less."""
    try:
        return vars(importlib.import_module("ml_dtypes"))
    except ImportError:
        return {}


def _check_cover(path: str, entries: list[ArrayEntry], data_start: int, size: int) -> None:
    """The tensors, sorted, must cover the data exactly: no overlap, no gap, nothing after."""
    reached = data_start
    for entry in entries:
        if entry.start != reached:
            fault = "gap" if entry.start > reached else "overlap"
            expected, found = reached - data_start, entry.start - data_start
            refuse(path, f"{fault}: expected begin {expected}, found {found}", entry.name)
        reached = entry.end
    if reached != size:
        fault = "truncated" if reached > size else "bytes after the last tensor"
        refuse(path, f"{fault}: expected {reached} bytes, found {size}")
