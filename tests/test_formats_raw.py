"""Raw files: bytes, a dtype and a shape of the caller's, held against numpy.fromfile."""

from __future__ import annotations

import pathlib
import tempfile
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from gpuq.errors import FormatError
from gpuq.formats import open_arrays


def test_without_a_dtype_a_raw_file_is_its_bytes(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(b"hello")
    file = open_arrays(path)
    entry = file["a"]
    assert (file.format, file.size, dict(file.metadata)) == ("raw", 5, {})
    assert (entry.dtype, entry.dtype_name, entry.shape) == (np.dtype("u1"), "|u1", (5,))
    assert (entry.start, entry.end, entry.order, entry.packed) == (0, 5, "C", False)


def test_an_empty_raw_file_is_an_array_of_no_bytes(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(b"")
    assert open_arrays(path)["a"].shape == (0,)
    assert open_arrays(path, dtype="<f4")["a"].shape == (0,)
    assert open_arrays(path, dtype="<f4", shape=(3, 0))["a"].nbytes == 0


@settings(max_examples=50, deadline=None)
@given(
    array=hnp.arrays(
        dtype=st.one_of(hnp.integer_dtypes(), hnp.floating_dtypes(), hnp.boolean_dtypes()),
        shape=hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
    )
)
def test_any_array_written_by_tofile_comes_back(array: np.ndarray[Any, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "a.bin")
        array.tofile(path)
        entry = open_arrays(path, dtype=array.dtype, shape=array.shape)["a"]
        assert (entry.dtype, entry.shape, entry.nbytes) == (array.dtype, array.shape, array.nbytes)
        flat = open_arrays(path, dtype=array.dtype)["a"]
        assert flat.shape == np.fromfile(path, array.dtype).shape


@pytest.mark.parametrize(
    ("dtype", "shape", "expected"),
    [
        ("<f4", None, "multiple of 4 bytes, found 10"),
        ("<f4", (3,), "12 bytes for (3,) of float32, found 10"),
        (None, (3, 3), "9 bytes"),
        (None, 11, "11 bytes"),
        ("<u2", (2, 2), "8 bytes"),
        ("<u2", (2**62, 2**62), "2**63 - 1"),
        ("<u2", (2**62, 2**62, 0), "2**63 - 1"),
    ],
)
def test_a_size_that_does_not_fit_is_an_error_naming_both(
    tmp_path: pathlib.Path, dtype: str | None, shape: tuple[int, ...] | None, expected: str
) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(bytes(10))
    with pytest.raises(FormatError) as caught:
        open_arrays(path, dtype=dtype, shape=shape)
    assert expected in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("dtype", ["O", "S0", "V0", ("<f4", (2,)), [("a", "O")]])
def test_a_dtype_without_a_fixed_size_is_the_callers_mistake(
    tmp_path: pathlib.Path, dtype: Any
) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(bytes(8))
    with pytest.raises(ValueError, match="dtype") as caught:
        open_arrays(path, dtype=dtype)
    assert not isinstance(caught.value, FormatError)


@pytest.mark.parametrize(("shape", "error"), [((-1, 8), ValueError), ((2.0, 4), TypeError)])
def test_a_shape_of_anything_but_naturals_is_the_callers_mistake(
    tmp_path: pathlib.Path, shape: Any, error: type[Exception]
) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(bytes(8))
    with pytest.raises(error) as caught:
        open_arrays(path, shape=shape)
    assert not isinstance(caught.value, FormatError)


def test_dtype_names_tell_types_apart(tmp_path: pathlib.Path) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    path = tmp_path / "a.bin"
    path.write_bytes(bytes(8))
    record = [("a", "<i4"), ("b", ">f4")]
    assert open_arrays(path, dtype=ml_dtypes.bfloat16)["a"].dtype_name == "bfloat16"
    assert open_arrays(path, dtype="V2")["a"].dtype_name == "|V2"
    assert open_arrays(path, dtype=">f4")["a"].dtype_name == ">f4"
    assert open_arrays(path, dtype=record)["a"].dtype_name == str(record)
