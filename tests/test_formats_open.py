"""open_arrays as a whole: which format, which errors, and that only headers are read."""

from __future__ import annotations

import json
import os
import pathlib

import numpy as np
import pytest

from gpuq.errors import FormatError
from gpuq.formats import ArrayEntry, ArrayFile, open_arrays

SUFFIXES = ["bin", "npy", "safetensors", "safetensors.index.json"]


def safetensors_bytes(header: dict[str, object], data: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


@pytest.mark.parametrize(
    ("name", "format"),
    [
        ("a.bin", "raw"),
        ("npy", "raw"),
        ("a.npy.gz", "raw"),
        ("a.npy", "npy"),
        ("a.NPY", "npy"),
        ("a.safetensors", "safetensors"),
        ("a.safetensors.index.json", "safetensors-index"),
        ("a.index.json", "raw"),
    ],
)
def test_the_suffix_decides_the_format(tmp_path: pathlib.Path, name: str, format: str) -> None:
    path = tmp_path / name
    if format == "npy":
        with path.open("wb") as file:
            np.save(file, np.zeros(3))
    elif format == "safetensors":
        path.write_bytes(safetensors_bytes({}))
    else:
        path.write_bytes(b'{"weight_map":{}}')
    assert open_arrays(path).format == format
    assert open_arrays(str(path)).path == str(path)


@pytest.mark.parametrize("suffix", SUFFIXES[1:])
def test_a_dtype_or_a_shape_makes_any_file_raw(tmp_path: pathlib.Path, suffix: str) -> None:
    path = tmp_path / f"a.{suffix}"
    path.write_bytes(bytes(8))
    assert open_arrays(path, dtype="<f4").format == "raw"
    assert open_arrays(path, shape=8).format == "raw"


def test_an_array_file_is_a_read_only_mapping(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(bytes(8))
    file = open_arrays(path)
    assert isinstance(file, ArrayFile)
    assert list(file) == ["a"]
    assert len(file) == 1
    assert "b" not in file
    assert file["a"] == ArrayEntry("a", str(path), np.dtype("u1"), "|u1", (8,), 0, 8)
    assert file["a"].nbytes == 8
    assert repr(file) == f"<ArrayFile {str(path)!r}: raw, 1 arrays, 8 bytes>"
    with pytest.raises(KeyError):
        file["b"]
    with pytest.raises(TypeError):
        file.metadata["x"] = 1  # type: ignore[index]
    with pytest.raises(AttributeError):
        file["a"].start = 1  # type: ignore[misc]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_missing_file_stays_file_not_found(tmp_path: pathlib.Path, suffix: str) -> None:
    path = tmp_path / f"missing.{suffix}"
    with pytest.raises(FileNotFoundError) as caught:
        open_arrays(path)
    assert caught.value.filename == str(path)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_directory_stays_is_a_directory(tmp_path: pathlib.Path, suffix: str) -> None:
    path = tmp_path / f"folder.{suffix}"
    path.mkdir()
    with pytest.raises(IsADirectoryError) as caught:
        open_arrays(path)
    assert caught.value.filename == str(path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_an_unreadable_file_stays_permission_error(tmp_path: pathlib.Path, suffix: str) -> None:
    path = tmp_path / f"secret.{suffix}"
    path.write_bytes(bytes(8))
    path.chmod(0)
    with pytest.raises(PermissionError) as caught:
        open_arrays(path)
    assert caught.value.filename == str(path)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_pipe_is_refused_and_not_waited_for(tmp_path: pathlib.Path, suffix: str) -> None:
    path = tmp_path / f"pipe.{suffix}"
    os.mkfifo(path)
    with pytest.raises(FormatError, match="regular file"):
        open_arrays(path)


def test_headers_alone_are_read_of_files_larger_than_any_memory(tmp_path: pathlib.Path) -> None:
    huge = 1 << 43  # 8 TiB, sparse
    npy, tensors = tmp_path / "a.npy", tmp_path / "a.safetensors"
    head = {"descr": "|u1", "fortran_order": False, "shape": (huge,)}
    with npy.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, head)
    entry = {"dtype": "U8", "shape": [huge], "data_offsets": [0, huge]}
    tensors.write_bytes(safetensors_bytes({"a": entry}))
    for path in (npy, tensors):
        start = path.stat().st_size
        try:
            os.truncate(path, start + huge)
        except OSError:
            pytest.skip("the file system has no files of 8 TiB")
        entry_of = open_arrays(path)["a"]
        assert (entry_of.start, entry_of.end) == (start, start + huge)
        assert entry_of.shape == (huge,)


def test_messages_are_one_line_even_where_the_names_are_not(tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "two\nlines"
    folder.mkdir()
    path = folder / "a.safetensors"
    path.write_bytes(safetensors_bytes({"x\ny" * 1000: {"dtype": "F\n3", "shape": []}}))
    with pytest.raises(FormatError) as caught:
        open_arrays(path)
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    assert len(message) < len(str(path)) + 500
    assert "a.safetensors" in message
    assert r"'x\nyx" in message
    assert r"found 'F\n3'" in message
