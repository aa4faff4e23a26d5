"""Where the arrays of a file lie: read from headers alone, never from the data.

`open_arrays` answers for raw files, `.npy`, `.safetensors` and sharded checkpoints with the same
mapping of names to `ArrayEntry`: dtype, shape, and the bytes ``[start, end)`` of which file.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy.typing as npt

from .entries import ArrayEntry, ArrayFile
from .npy import open_npy
from .raw import open_raw
from .safetensors import open_safetensors
from .shards import open_shards

__all__ = ["ArrayEntry", "ArrayFile", "open_arrays"]


def open_arrays(
    path: str | os.PathLike[str],
    *,
    dtype: npt.DTypeLike | None = None,
    shape: int | Sequence[int] | None = None,
) -> ArrayFile:
    """Find the arrays of a file by its headers.

    The suffix decides: ``.npy``, ``.safetensors``, ``.safetensors.index.json`` (a sharded
    checkpoint); every other file is raw, one array over all its bytes. The file is closed again
    before the call returns, and what it holds may change later: a reader checks its own ends.

    Parameters
    ----------
    path : str or os.PathLike
        The file.
    dtype : dtype-like, optional
        Type of the elements of a raw file, `uint8` if only `shape` is given. Given either, the
        file is raw whatever its suffix.
    shape : int or sequence of int, optional
        Shape of a raw file, in elements. By default one dimension over the whole file.

    Returns
    -------
    ArrayFile
        Name to `ArrayEntry`. A safetensors file lists its tensors by offset, an index as its
        ``weight_map`` does, and takes each from the shard which that map names.

    Raises
    ------
    FormatError
        The content is not what the format demands; one line that names the file, the tensor,
        what was expected and what was found. Shards that an index names but that do not exist
        are such an error, all of them in one.
    OSError
        The file itself is missing, a directory, or not readable.
    TypeError, ValueError
        `dtype` is none, or has no fixed size; `shape` is negative or not of integers.

    Notes
    -----
    Header limits, checked before a header is read: 100 000 000 bytes for safetensors and for an
    index, 10 000 characters for ``.npy``; those of the reference implementations.

    Examples
    --------
    >>> entry = open_arrays("model.safetensors")["weight"]      # doctest: +SKIP
    >>> entry.dtype_name, entry.shape, entry.start, entry.end   # doctest: +SKIP
    ('F32', (2, 3), 88, 112)
    """
    place = os.fsdecode(path)
    if dtype is not None or shape is not None:
        return open_raw(place, dtype, shape)
    suffixes = place.lower()
    if suffixes.endswith(".safetensors.index.json"):
        return open_shards(place)
    if suffixes.endswith(".safetensors"):
        return open_safetensors(place)
    if suffixes.endswith(".npy"):
        return open_npy(place)
    return open_raw(place, dtype, shape)
