"""Sharded checkpoints: an index says which `.safetensors` file beside it holds which tensor.

Source: `save_pretrained` of Hugging Face transformers, which writes
``{"metadata": {...}, "weight_map": {tensor: shard}}``. An index is data from elsewhere, so a
shard must lie in the index's folder or below it. Symbolic links are followed: the Hugging Face
cache is made of them.
"""

from __future__ import annotations

import os
from pathlib import PurePosixPath
from typing import Any

from .entries import ArrayEntry, ArrayFile, open_regular, refuse, show
from .safetensors import MAX_HEADER_BYTES, open_safetensors
from .strict_json import parse_object


def open_shards(path: str) -> ArrayFile:
    """Describe the tensors of a shard index; see `gpuq.formats.open_arrays`."""
    with open_regular(path) as (file, size):
        if size > MAX_HEADER_BYTES:
            refuse(path, f"expected at most {MAX_HEADER_BYTES} bytes of index, found {size}")
        index = parse_object(path, file.read(size))
    metadata = index.get("metadata", {})
    if not isinstance(metadata, dict):
        refuse(path, f"metadata: expected an object, found {show(metadata)}")
    weight_map = _checked_weight_map(path, index.get("weight_map"))
    shards = _open_all(path, weight_map)
    entries = [_entry(path, name, shards[shard]) for name, shard in weight_map.items()]
    total = sum(shard.size for shard in shards.values())
    return ArrayFile(path, "safetensors-index", total, entries, metadata)


def _checked_weight_map(path: str, weight_map: Any) -> dict[str, str]:
    if not isinstance(weight_map, dict):
        refuse(path, f"weight_map: expected an object, found {show(weight_map)}")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not _is_inside(shard):
            expected = "a shard in the index's folder"
            refuse(path, f"weight_map: expected {expected}, found {show(shard)}", name)
    return weight_map


def _is_inside(shard: str) -> bool:
    parts = PurePosixPath(shard).parts
    outside = shard.startswith("/") or ".." in parts or "\\" in shard or "\0" in shard
    return bool(parts) and not outside


def _open_all(path: str, weight_map: dict[str, str]) -> dict[str, ArrayFile]:
    """Every shard the map names, opened once; all that are missing in one error."""
    folder = os.path.dirname(path)
    places = {shard: os.path.join(folder, shard) for shard in sorted(set(weight_map.values()))}
    missing = [shard for shard, place in places.items() if not os.path.exists(place)]
    if missing:
        names = ", ".join(map(repr, missing))
        refuse(path, f"expected {len(places)} shards, found {len(missing)} missing: {names}")
    return {shard: open_safetensors(place) for shard, place in places.items()}


def _entry(path: str, name: str, shard: ArrayFile) -> ArrayEntry:
    if name not in shard:
        refuse(path, f"expected it in shard {show(shard.path)}, which has no such tensor", name)
    return shard[name]
