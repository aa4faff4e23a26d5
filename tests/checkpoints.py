"""Small safetensors files, made without the package of that name."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

Tensor = tuple[str, list[int], bytes]


def random_bytes(count: int, seed: int) -> bytes:
    return np.random.default_rng(seed).bytes(count)


def write_safetensors(path: Path, tensors: dict[str, Tensor]) -> Path:
    """Write dtype, shape and bytes of each tensor; the data begin at an odd offset."""
    header, data = {}, b""
    for name, (dtype, shape, content) in tensors.items():
        offsets = [len(data), len(data) + len(content)]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        data += content
    text = json.dumps(header).encode()
    text += b" " * (1 - len(text) % 2)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def write_index(path: Path, shards: dict[str, dict[str, Tensor]]) -> Path:
    """Write shards beside `path`, and `path` as their index."""
    for shard, tensors in shards.items():
        write_safetensors(path.parent / shard, tensors)
    weight_map = {name: shard for shard, tensors in shards.items() for name in tensors}
    path.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return path
