"""Sharded checkpoints: the weight map decides, and cannot lead out of its folder."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import numpy as np
import pytest

from gpuq.errors import FormatError
from gpuq.formats import open_arrays

safetensors_numpy = pytest.importorskip("safetensors.numpy")

NAME = "model.safetensors.index.json"


def write_shard(path: pathlib.Path, **arrays: np.ndarray[Any, Any]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(safetensors_numpy.save(arrays))


def write_index(folder: pathlib.Path, weight_map: Any, **more: Any) -> pathlib.Path:
    path = folder / NAME
    path.write_text(json.dumps({"weight_map": weight_map, **more}))
    return path


def refusal(path: pathlib.Path) -> str:
    with pytest.raises(FormatError) as caught:
        open_arrays(path)
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    return message


@pytest.fixture
def two_shards(tmp_path: pathlib.Path) -> pathlib.Path:
    write_shard(tmp_path / "one.safetensors", a=np.arange(4, dtype="<f4"), both=np.zeros(2, "u1"))
    write_shard(tmp_path / "two.safetensors", b=np.arange(6, dtype="<i8"), both=np.ones(3, "u1"))
    return tmp_path


def test_entries_carry_the_path_of_their_shard(two_shards: pathlib.Path) -> None:
    weight_map = {"b": "two.safetensors", "a": "one.safetensors"}
    file = open_arrays(write_index(two_shards, weight_map, metadata={"total_size": 64}))
    assert list(file) == ["b", "a"]
    assert (file.format, dict(file.metadata)) == ("safetensors-index", {"total_size": 64})
    shards = [two_shards / "one.safetensors", two_shards / "two.safetensors"]
    assert file.size == sum(shard.stat().st_size for shard in shards)
    for name, shard in zip("ab", shards, strict=True):
        entry = file[name]
        assert entry.path == str(shard)
        assert entry == open_arrays(shard)[name]
        data = shard.read_bytes()[entry.start : entry.end]
        oracle = safetensors_numpy.load_file(shard)[name]
        assert np.array_equal(np.frombuffer(data, entry.dtype), oracle)


def test_an_index_in_the_working_directory_is_found(
    two_shards: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_index(two_shards, {"a": "one.safetensors"})
    monkeypatch.chdir(two_shards)
    assert open_arrays(NAME)["a"].path == "one.safetensors"


@pytest.mark.parametrize(("shard", "extent"), [("one", 2), ("two", 3)])
def test_the_map_decides_where_two_shards_have_the_name(
    two_shards: pathlib.Path, shard: str, extent: int
) -> None:
    path = write_index(two_shards, {"both": f"{shard}.safetensors", "a": "one.safetensors"})
    assert open_arrays(path)["both"].shape == (extent,)
    assert "b" not in open_arrays(path)


def test_all_missing_shards_are_named_in_one_error(two_shards: pathlib.Path) -> None:
    weight_map = {"a": "one.safetensors", "x": "z", "y": "n.safetensors", "w": "n" * 300}
    message = refusal(write_index(two_shards, weight_map))
    assert NAME in message
    assert f"expected 4 shards, found 3 missing: 'n.safetensors', '{'n' * 300}', 'z'" in message


def test_a_name_its_shard_lacks_is_an_error(two_shards: pathlib.Path) -> None:
    message = refusal(write_index(two_shards, {"b": "one.safetensors"}))
    assert NAME in message
    assert "tensor 'b'" in message
    assert "one.safetensors" in message


def test_a_damaged_shard_is_named(two_shards: pathlib.Path) -> None:
    (two_shards / "two.safetensors").write_bytes(b"short")
    message = refusal(write_index(two_shards, {"b": "two.safetensors"}))
    assert message.startswith(f"{two_shards / 'two.safetensors'}: truncated")


@pytest.mark.parametrize(
    "shard",
    [
        "../outside.safetensors",
        "sub/../../outside.safetensors",
        "sub/..",
        "..",
        "/etc/passwd",
        "//etc/passwd",
        "..\\outside.safetensors",
        "C:\\outside.safetensors",
        "a\0b",
        "",
        ".",
        None,
        3,
        ["one.safetensors"],
    ],
)
def test_a_shard_outside_the_folder_is_refused(two_shards: pathlib.Path, shard: Any) -> None:
    write_shard(two_shards / "sub" / "inside.safetensors", a=np.zeros(1))
    write_shard(two_shards.parent / "outside.safetensors", a=np.zeros(1))
    message = refusal(write_index(two_shards, {"a": shard}))
    assert "tensor 'a'" in message
    assert "in the index's folder" in message


def test_shards_below_the_folder_and_through_links_are_read(two_shards: pathlib.Path) -> None:
    # The Hugging Face cache links every file of a snapshot to ../../blobs.
    write_shard(two_shards.parent / "blobs" / "0a1b", a=np.zeros(5, "u1"))
    (two_shards / "linked.safetensors").symlink_to(two_shards.parent / "blobs" / "0a1b")
    write_shard(two_shards / "sub" / "inside.safetensors", c=np.zeros(7, "u1"))
    path = write_index(two_shards, {"a": "linked.safetensors", "c": "sub/inside.safetensors"})
    assert open_arrays(path)["a"].shape == (5,)
    assert open_arrays(path)["c"].shape == (7,)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"", "UTF-8 JSON"),
        (b"[]", "a JSON object, found list"),
        (b"[" * 900 + b"]" * 900, "header: expected"),
        (b"null", "a JSON object, found NoneType"),
        (b"{}", "weight_map: expected an object, found None"),
        (b'{"weight_map":[]}', "weight_map: expected an object"),
        (b'{"weight_map":{},"metadata":3}', "metadata: expected an object"),
        (b'{"weight_map":{"a":"x","a":"y"}}', "key 'a' twice"),
        (b'{"weight_map":{},"weight_map":{}}', "key 'weight_map' twice"),
        (b'{"weight_map":{"\xff":"x"}}', "UTF-8"),
        (b'{"weight_map":{"a":"\\ud800"}}', "surrogates not allowed"),
        (b'{"weight_map":{},"x":' + b"[" * 200 + b"]" * 200 + b"}", "127 levels"),
        (b'{"weight_map":' + b"[" * 1_000_000, "127 levels"),
    ],
)
def test_a_damaged_index_is_a_format_error(
    tmp_path: pathlib.Path, text: bytes, expected: str
) -> None:
    path = tmp_path / NAME
    path.write_bytes(text)
    message = refusal(path)
    assert expected in message
    assert str(path) in message


def test_an_index_too_large_to_be_one_is_not_read(tmp_path: pathlib.Path) -> None:
    path = tmp_path / NAME
    path.write_bytes(b"{")
    with path.open("r+b") as file:
        file.truncate(1 << 40)
    assert "at most 100000000 bytes of index" in refusal(path)
