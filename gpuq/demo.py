"""The file of ``gpuq demo``: a small checkpoint whose arrays all begin where no block does."""

from __future__ import annotations

import json
import math
import os

import numpy as np

_ITEM_BYTES = {"U8": 1, "BF16": 2, "F32": 4}
_COLUMNS = 384
_LENGTH_BYTES = 8


def write_demo_file(path: str, mebibytes: int) -> None:
    """Write a `.safetensors` file of about `mebibytes` MiB of random bytes, from a fixed seed.

    Its header has an odd length and its arrays have even ones, so all begin and end at odd
    offsets; the format allows that.
    """
    rows = max((mebibytes << 20) // (_COLUMNS * 6), 1)
    arrays: list[tuple[str, str, tuple[int, ...]]] = [
        ("tokens", "U8", (100_002,)),
        ("embeddings", "F32", (rows, _COLUMNS)),
        ("layer.0.weight", "BF16", (rows, _COLUMNS)),
        ("layer.0.bias", "F32", (_COLUMNS,)),
        ("scale", "F32", ()),
        ("unused", "F32", (0, _COLUMNS)),
    ]
    header: dict[str, object] = {}
    end = 0
    for name, dtype, shape in arrays:
        begin, end = end, end + math.prod(shape) * _ITEM_BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (1 - len(text) % 2)  # the format allows spaces at the end
    random = np.random.default_rng(0)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(_LENGTH_BYTES, "little") + text)
        for _, dtype, shape in arrays:
            file.write(random.bytes(math.prod(shape) * _ITEM_BYTES[dtype]))
        file.flush()
        os.fsync(file.fileno())  # or the first direct read would wait for it
