"""Which arrays may be destinations on a GPU, by their ``__cuda_array_interface__``."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gpuq
from gpuq.host.cuda_device import check_interface, stream_handle


def interface(array: Any, **changes: Any) -> dict[str, Any]:
    """Return the interface that a NumPy array would have on a GPU."""
    return {
        "shape": array.shape,
        "typestr": array.dtype.str,
        "data": (array.ctypes.data, False),
        "strides": array.strides,
        "version": 3,
        "stream": None,
    } | changes


BYTES = np.zeros(120, dtype=np.uint8)
WORDS = np.zeros((4, 5, 6), dtype=np.int32)
ODD = {"strides": (1, 7, -3)}


@pytest.mark.parametrize(
    ("described", "nbytes"),
    [
        pytest.param(interface(BYTES), 120, id="bytes"),
        pytest.param(interface(WORDS), 480, id="three-dimensions"),
        pytest.param(interface(WORDS, strides=None), 480, id="strides-none"),
        pytest.param(interface(np.zeros(())), 8, id="no-dimension"),
        pytest.param(interface(WORDS[:, :, 2:2]), 0, id="zero-size"),
        pytest.param(
            interface(np.zeros((0, 4)), data=(0, False), strides=(-8, 3)), 0, id="zero-size-at-0"
        ),
        pytest.param(
            interface(np.zeros((1, 3, 1)), strides=(7, 8, 1)), 24, id="size-1-odd-strides"
        ),
        pytest.param(interface(np.zeros((3, 1)), strides=(8, -8)), 24, id="size-1-negative-stride"),
        pytest.param(interface(np.zeros(3, dtype="V2")), 6, id="bfloat16-as-torch-says-it"),
        pytest.param(interface(np.zeros(3, dtype=[("a", "u1"), ("b", "<f8")])), 27, id="records"),
        pytest.param(interface(np.zeros(2, dtype="M8[ns]")), 16, id="times"),
    ],
)
def test_contiguous_writable_memory_is_taken(described, nbytes):
    assert check_interface(described) == (described["data"][0], nbytes)


def test_a_version_2_interface_has_neither_stream_nor_strides():
    described = interface(BYTES, version=2)
    del described["stream"], described["strides"]
    assert check_interface(described) == (BYTES.ctypes.data, 120)


@pytest.mark.parametrize(
    ("described", "what"),
    [
        pytest.param(interface(BYTES, data=(1, True)), "read-only", id="read-only"),
        pytest.param(interface(BYTES[::2]), "not C-contiguous", id="strided"),
        pytest.param(interface(BYTES[::-1]), "not C-contiguous", id="reversed"),
        pytest.param(interface(np.asfortranarray(WORDS)), "not C-contiguous", id="fortran"),
        pytest.param(interface(WORDS.transpose(0, 2, 1)), "not C-contiguous", id="transposed"),
        pytest.param(interface(WORDS[:, :, :5]), "not C-contiguous", id="rows-with-gaps"),
        pytest.param(interface(WORDS[:, ::-1]), "not C-contiguous", id="negative-stride"),
        pytest.param(
            interface(np.broadcast_to(WORDS[0], (4, 5, 6)), data=(1, False)),
            "not C-contiguous",
            id="broadcast",
        ),
        pytest.param(
            interface(np.zeros((1, 3, 2)), strides=(7, 8, 8)), "not C-contiguous", id="overlapping"
        ),
        pytest.param(interface(BYTES, mask=np.zeros(120, bool)), "masked", id="masked"),
        pytest.param(interface(np.zeros(3, dtype=object)), "holds Python objects", id="objects"),
        pytest.param(interface(BYTES, strides=(1, 1)), "strides", id="too-many-strides"),
        pytest.param(interface(BYTES, typestr="<bf16"), "dtype", id="no-dtype"),
        pytest.param({"shape": (3,), "version": 3}, "lacks", id="no-data"),
    ],
)
def test_other_memory_is_refused(described, what):
    with pytest.raises(gpuq.DestinationError, match=what):
        check_interface(described)


class _Torch:
    cuda_stream = 0x70


class _Protocol:
    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, 0x80


class _OldCupy:
    ptr = 0x90


class _OldNumba:
    class handle:  # noqa: N801
        value = None


@pytest.mark.parametrize(
    ("stream", "handle"),
    [(None, 0), (0, 0), (2, 2), (_Torch(), 0x70), (_Protocol(), 0x80), (_OldCupy(), 0x90),
     (_OldNumba(), 0)],
)  # fmt: skip
def test_streams_of_all_libraries_have_a_handle(stream, handle):
    assert stream_handle(stream) == handle


def test_numba_streams_have_a_handle():
    from cuda.bindings import driver as binding
    from numba.cuda.cudadrv.driver import Stream

    assert stream_handle(Stream(binding.CUstream(0x1234))) == 0x1234
    assert stream_handle(Stream(binding.CUstream(0))) == 0


def test_what_is_no_stream_is_refused():
    with pytest.raises(TypeError, match="str is no CUDA stream"):
        stream_handle("default")
