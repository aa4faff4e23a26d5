"""A ``.safetensors`` file with the tensors of a language model: a few large ones, many small."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

LAYERS = 30
# Name, dtype, bytes of an element, share of the layer. Shares of 0 are small and of fixed length.
_LAYER = (
    ("input_norm.weight", "F32", 4, 0),
    ("attention.q.weight", "F16", 2, 10),
    ("attention.k.weight", "F16", 2, 3),
    ("attention.v.weight", "F16", 2, 3),
    ("attention.o.weight", "F16", 2, 10),
    ("attention.o.bias", "F32", 4, 0),
    ("feed_forward.gate.weight", "F16", 2, 25),
    ("feed_forward.up.weight", "F16", 2, 25),
    ("feed_forward.down.weight", "I8", 1, 24),
    ("feed_forward.norm.weight", "F32", 4, 0),
)
_SHARES = sum(share for *_, share in _LAYER)
_SMALL_BYTES = 8192
_ROW_BYTES = 4096
_CHUNK_BYTES = 4 << 20
TENSORS = LAYERS * len(_LAYER)
LEAST_BYTES = LAYERS * _SHARES * _ROW_BYTES


def _header(nbytes: int) -> tuple[dict[str, object], int]:
    """Return the header of a file whose tensors have about `nbytes`, and their bytes."""
    header: dict[str, object] = {}
    position = 0
    for layer in range(LAYERS):
        for name, dtype, item_bytes, share in _LAYER:
            rows = nbytes * share // (_SHARES * LAYERS * _ROW_BYTES)
            size = rows * _ROW_BYTES if share else _SMALL_BYTES
            columns = _ROW_BYTES // item_bytes
            header[f"layers.{layer}.{name}"] = {
                "dtype": dtype,
                "shape": [rows, columns] if share else [size // item_bytes],
                "data_offsets": [position, position + size],
            }
            position += size
    return header, position


@contextmanager
def tensor_file(nbytes: int, directory: Path, *, keep: bool = False) -> Iterator[Path]:
    """Yield a new file of about `nbytes`, of random bytes and brought to the disk.

    Parameters
    ----------
    nbytes : int
        At least LEAST_BYTES.
    directory : Path
        Where it is made.
    keep : bool
        Whether it stays.

    Raises
    ------
    ValueError
        `nbytes` is too small.
    OSError
    """
    if nbytes < LEAST_BYTES:
        raise ValueError(f"the size is too small: {nbytes} bytes; at least {LEAST_BYTES}")
    header, data_bytes = _header(nbytes)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    descriptor, name = tempfile.mkstemp(prefix="gpuq-bench-", suffix=".safetensors", dir=directory)
    made = Path(name)
    generator = np.random.default_rng(nbytes)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for start in range(0, data_bytes, _CHUNK_BYTES):
                file.write(generator.bytes(min(_CHUNK_BYTES, data_bytes - start)))
            file.flush()
            os.fsync(file.fileno())
        yield made
    finally:
        if not keep:
            made.unlink(missing_ok=True)
