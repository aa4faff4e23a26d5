"""Raw files: the whole file is one array, and only the caller knows of what."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from pathlib import PurePath
from typing import Any

import numpy as np
import numpy.typing as npt

from .entries import ArrayEntry, ArrayFile, count_bits, dtype_name, open_regular, refuse


def open_raw(
    path: str, dtype: npt.DTypeLike | None, shape: int | Sequence[int] | None
) -> ArrayFile:
    """Describe a file as one array; see `gpuq.formats.open_arrays`."""
    element = _checked_dtype(dtype)
    with open_regular(path) as (_, size):
        pass
    if shape is None:
        if size % element.itemsize:
            refuse(path, f"expected a multiple of {element.itemsize} bytes, found {size}")
        extents: tuple[int, ...] = (size // element.itemsize,)
    else:
        extents = _checked_shape(shape)
        expected = count_bits(path, None, extents, 8 * element.itemsize) // 8
        if size != expected:
            refuse(path, f"expected {expected} bytes for {extents} of {element}, found {size}")
    name = PurePath(path).stem
    entry = ArrayEntry(name, path, element, dtype_name(element), extents, 0, size)
    return ArrayFile(path, "raw", size, [entry])


def _checked_dtype(dtype: npt.DTypeLike | None) -> np.dtype[Any]:
    element = np.dtype(np.uint8 if dtype is None else dtype)
    if element.hasobject or element.subdtype is not None or element.itemsize == 0:
        raise ValueError(f"dtype: expected elements of a fixed size in bytes, got {element!r}")
    return element


def _checked_shape(shape: int | Sequence[int]) -> tuple[int, ...]:
    extents = shape if isinstance(shape, Sequence) else (shape,)
    checked = tuple(operator.index(extent) for extent in extents)
    if any(extent < 0 for extent in checked):
        raise ValueError(f"shape: expected extents of at least 0, got {checked}")
    return checked
