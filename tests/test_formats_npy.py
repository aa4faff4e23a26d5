"""`.npy` headers, held against numpy.load on whole, damaged and hostile files."""

from __future__ import annotations

import io
import pathlib
import tempfile
import warnings
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from gpuq.errors import FormatError
from gpuq.formats import ArrayEntry, open_arrays

Array = np.ndarray[Any, Any]
MAGIC = b"\x93NUMPY"


def read(entry: ArrayEntry) -> Array:
    data = pathlib.Path(entry.path).read_bytes()[entry.start : entry.end]
    return np.frombuffer(data, entry.dtype).reshape(entry.shape, order=entry.order)


def npy_bytes(array: Array, version: tuple[int, int] | None = None) -> bytes:
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, array, version, allow_pickle=True)
    return buffer.getvalue()


def with_header(header: bytes, data: bytes = b"", version: int = 1) -> bytes:
    length = len(header).to_bytes(2 if version == 1 else 4, "little")
    return MAGIC + bytes([version, 0]) + length + header + data


def header_text(descr: str = "'<f4'", shape: str = "()", order: str = "False") -> bytes:
    return f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}}}".encode()


def refusal(path: pathlib.Path) -> str:
    with pytest.raises(FormatError) as caught:
        open_arrays(path)
    message = str(caught.value)
    assert str(path) in message
    assert len(message.splitlines()) == 1
    return message


@pytest.fixture
def path(tmp_path: pathlib.Path) -> pathlib.Path:
    return tmp_path / "a.npy"


@settings(max_examples=100, deadline=None)
@given(
    array=hnp.arrays(
        dtype=st.one_of(hnp.scalar_dtypes(), hnp.byte_string_dtypes(), hnp.unicode_string_dtypes()),
        shape=hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4),
    ),
    version=st.sampled_from([(1, 0), (2, 0), (3, 0)]),
    fortran=st.booleans(),
)
def test_any_array_numpy_saves_comes_back(
    array: Array, version: tuple[int, int], fortran: bool
) -> None:
    array = np.asfortranarray(array) if fortran else np.ascontiguousarray(array)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # NumPy warns that old versions cannot read version 3
        path = pathlib.Path(folder, "a.npy")
        path.write_bytes(npy_bytes(array, version))
        entry = open_arrays(path)["a"]
        oracle = np.load(path, allow_pickle=False)
        assert (entry.dtype, entry.shape) == (oracle.dtype, oracle.shape)
        assert read(entry).tobytes() == oracle.tobytes()
        assert (entry.order == "F") == (array.flags.f_contiguous and not array.flags.c_contiguous)
        assert entry.dtype_name == array.dtype.str


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_records_stay_records(path: pathlib.Path, version: tuple[int, int]) -> None:
    dtype = np.dtype([("a", "<i4"), ("b", ">f8", (2,)), ("c", [("d", "S3")])])
    array = np.zeros(3, dtype)
    array["a"] = [1, 2, 3]
    path.write_bytes(npy_bytes(array, version))
    entry = open_arrays(path)["a"]
    assert entry.dtype == dtype
    assert entry.dtype_name == str(dtype.descr)
    assert np.array_equal(read(entry)["a"], [1, 2, 3])


@pytest.mark.filterwarnings("ignore:Stored array in format")
@pytest.mark.parametrize("name", ["\u00e9", "\u4e2d", "\U0001f600", "'\\\u00e9\""])
def test_version_3_names_fields_in_any_script(path: pathlib.Path, name: str) -> None:
    array = np.zeros(2, [(name, "<f4")])
    path.write_bytes(npy_bytes(array, (3, 0)))
    assert open_arrays(path)["a"].dtype == array.dtype == np.load(path).dtype


@pytest.mark.parametrize("dtype", ["S0", "U0", "V0", []])
def test_elements_of_no_bytes_are_fine(path: pathlib.Path, dtype: Any) -> None:
    path.write_bytes(npy_bytes(np.ndarray((3,), dtype)))
    entry = open_arrays(path)["a"]
    oracle = np.load(path, allow_pickle=False)
    assert (entry.dtype, entry.shape, entry.nbytes) == (oracle.dtype, oracle.shape, 0)


@pytest.mark.parametrize("array", [np.array([None, "x"]), np.zeros(2, [("a", "O")])])
def test_object_arrays_are_refused(path: pathlib.Path, array: Array) -> None:
    path.write_bytes(npy_bytes(array))
    assert "pickle" in refusal(path)


@pytest.mark.parametrize("version", [1, 2, 3])
def test_a_file_cut_at_any_byte_is_refused(path: pathlib.Path, version: int) -> None:
    whole = npy_bytes(np.arange(6, dtype="<i4").reshape(2, 3), (version, 0))
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        message = refusal(path)
        assert f"got {size}" in message if size < 8 else f"found {size}" in message
        if size >= 128:
            assert f"truncated: expected {len(whole)} bytes, found {size}" in message


def test_bytes_after_the_array_are_refused_and_both_sizes_named(path: pathlib.Path) -> None:
    whole = npy_bytes(np.arange(6, dtype="<i4"))
    path.write_bytes(whole + b"x")
    message = refusal(path)
    assert f"expected {len(whole)} bytes, found {len(whole) + 1}" in message


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("version", [1, 2, 3])
@pytest.mark.parametrize("fortran", [False, True])
def test_with_any_byte_changed_gpuq_agrees_with_numpy_or_refuses_more(
    path: pathlib.Path, version: int, fortran: bool
) -> None:
    array = np.arange(6, dtype="<i4").reshape(2, 3, order="F" if fortran else "C")
    whole = npy_bytes(array, (version, 0))
    accepted = 0
    for position in range(whole.index(b"\n") + 1):
        values = {whole[position] ^ 1 << bit for bit in range(8)} | set(b"\0 '(),0189<>LfO|\xff")
        for value in values:
            damaged = bytearray(whole)
            damaged[position] = value
            path.write_bytes(damaged)
            accepted += agrees_with_numpy(path)
    assert accepted > 80  # spaces for tabs, and the like: the comparison did compare


def agrees_with_numpy(path: pathlib.Path) -> bool:
    """Both refuse (False), both accept and mean the same (True), or gpuq has its stated reason."""
    try:
        oracle = np.load(path, allow_pickle=False)
    except Exception:
        refusal(path)
        return False
    try:
        entry = open_arrays(path)["a"]
    except FormatError as error:
        stated = ("bytes after the array", "expected a dtype whose shape")
        assert any(reason in str(error) for reason in stated), path.read_bytes()  # noqa: PT017
        return False
    assert (entry.dtype, entry.shape) == (oracle.dtype, oracle.shape), path.read_bytes()
    assert read(entry).tobytes() == oracle.tobytes(), path.read_bytes()
    return True


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "magic"),
        (b"PK\x03\x04" + bytes(60), "magic"),
        (MAGIC + b"\x04\x00" + bytes(60), "version 1.0, 2.0 or 3.0, found 4.0"),
        (MAGIC + b"\x01\x01" + bytes(60), "found 1.1"),
        (MAGIC + b"\x02\x00\xff\xff\xff\xff", "at most 10000 characters of header, found 42949"),
        (with_header(b" " * 40_001, version=3), "at most 10000 characters"),
        (with_header(header_text() + b" " * 10_000), "large"),
        (with_header(b"'" + b"\xc3\xa9" * 10_001 + b"'", version=3), "large"),
        (with_header(b""), "SyntaxError|Cannot parse"),
        (with_header(b"\xff", version=3), "UnicodeDecodeError"),
        (with_header(b"(" * 500 + b")" * 500), "MemoryError|SyntaxError|RecursionError|parse"),
        (with_header(b"-" * 5000 + b"1"), "RecursionError|MemoryError|parse"),
        (with_header(b"__import__('os')"), "malformed"),
        (with_header(b"{}"), "correct keys"),
        (with_header(b"[1]"), "not a dictionary"),
        (with_header(header_text("'nonsense'")), "descriptor"),
        (with_header(header_text("'<f4', 'descr': 3")), "descr"),
        (with_header(header_text("'O'")), "pickle"),
        (with_header(header_text("('<f4', (2,))"), bytes(8)), "dtype whose shape|descr"),
        (with_header(header_text("'2f4'"), bytes(8)), "dtype whose shape"),
        (with_header(header_text("'S0'", shape=f"({2**64},)")), "2**63 - 1"),
        (with_header(header_text(shape="(-1,)")), "extents >= 0"),
        (with_header(header_text(shape="(-1, -1)"), bytes(4)), "extents >= 0"),
        (with_header(header_text(shape="(1.0,)")), "shape is not valid"),
        (with_header(header_text(shape="[1]"), bytes(4)), "shape is not valid"),
        (with_header(header_text(shape="(4294967296, 4294967296)")), "2**63 - 1"),
        (with_header(header_text(shape="(0, 4611686018427387904)")), "2**63 - 1"),
        (with_header(header_text(shape=f"(0x{'f' * 9000},)")), "too long to print"),
        (with_header(header_text(shape=f"({'9' * 5000},)")), "header"),
        (with_header(header_text(shape=f"({'1,' * 65})"), bytes(4)), "at most 64 extents"),
        (with_header(header_text(order="1")), "fortran_order"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_hostile_headers_are_format_errors(
    path: pathlib.Path, content: bytes, expected: str
) -> None:
    path.write_bytes(content)
    message = refusal(path)
    assert any(option in message for option in expected.split("|")), message
    with pytest.raises(Exception):  # noqa: B017, PT011 - NumPy has many types for this
        np.load(path, allow_pickle=False)


@pytest.mark.filterwarnings("error")
def test_a_warning_made_an_error_is_still_a_format_error(path: pathlib.Path) -> None:
    path.write_bytes(with_header(header_text(shape="(1L,)"), bytes(4)))  # as Python 2 wrote it
    assert "UserWarning" in refusal(path)


@pytest.mark.filterwarnings("ignore:Reading `.npy`")
def test_headers_of_python_2_are_read(path: pathlib.Path) -> None:
    path.write_bytes(with_header(header_text(shape="(1L,)"), bytes(4)))
    assert open_arrays(path)["a"].shape == (1,)


def test_a_limit_is_checked_before_the_header_is_read(path: pathlib.Path) -> None:
    # The length promises 4 GiB and the file is that long: reading it would take the memory.
    path.write_bytes(MAGIC + b"\x03\x00\xff\xff\xff\xff")
    with path.open("r+b") as file:
        file.truncate(1 << 33)
    assert "at most 10000 characters" in refusal(path)
