"""safetensors headers, held against the official package on whole, damaged and hostile files."""

from __future__ import annotations

import pathlib
import sys
import tempfile
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from gpuq.errors import FormatError
from gpuq.formats import ArrayEntry, ArrayFile, open_arrays
from gpuq.formats import safetensors as ours

official = pytest.importorskip("safetensors")
official_numpy = pytest.importorskip("safetensors.numpy")

Array = np.ndarray[Any, Any]
FOUR = '{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
TWO = '{"dtype":"U8","shape":[2],"data_offsets":[%d,%d]}'
EMPTY = '{"dtype":"F4","shape":[3,0],"data_offsets":[%d,%d]}'
WIDTHS = {name: 8 * np.dtype(kind).itemsize for name, kind in ours._NUMPY.items()} | {
    "BF16": 16, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip


@pytest.fixture
def path(tmp_path: pathlib.Path) -> pathlib.Path:
    return tmp_path / "a.safetensors"


def file_bytes(header: str | bytes, data: bytes = bytes(4)) -> bytes:
    text = header.encode() if isinstance(header, str) else header
    return len(text).to_bytes(8, "little") + text + data


def tensor(dtype: str = "F32", shape: str = "[1]", offsets: str = "[0,4]", more: str = "") -> str:
    return f'{{"a":{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}{more}}}}}'


def read(entry: ArrayEntry) -> bytes:
    return pathlib.Path(entry.path).read_bytes()[entry.start : entry.end]


def refusal(path: pathlib.Path) -> str:
    with pytest.raises(FormatError) as caught:
        open_arrays(path)
    message = str(caught.value)
    assert str(path) in message
    assert len(message.splitlines()) == 1
    return message


def official_accepts(path: pathlib.Path) -> bool:
    try:
        official.deserialize(path.read_bytes())
        with official.safe_open(path, "np"):
            return True
    except official.SafetensorError:
        return False


def assert_same_as_official(path: pathlib.Path, file: ArrayFile) -> None:
    oracle = dict(official.deserialize(path.read_bytes()))
    assert file.keys() == oracle.keys()
    for name, entry in file.items():
        assert entry.dtype_name == oracle[name]["dtype"]
        assert list(entry.shape) == oracle[name]["shape"]
        assert read(entry) == bytes(oracle[name]["data"])
    with official.safe_open(path, "np") as opened:
        assert dict(file.metadata) == (opened.metadata() or {})


def agrees_with_official(path: pathlib.Path) -> bool:
    if official_accepts(path):
        assert_same_as_official(path, open_arrays(path))
        return True
    refusal(path)
    return False


# Whole files


@settings(max_examples=60, deadline=None)
@given(
    arrays=st.dictionaries(
        st.text(max_size=8),
        hnp.arrays(
            dtype=st.sampled_from(sorted(ours._NUMPY.values())),
            shape=hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3),
        ),
        max_size=5,
    ),
    metadata=st.none()
    # Not empty: of no arrays and empty metadata the package 0.8.0 writes what is not JSON.
    | st.dictionaries(st.text(max_size=5), st.text(max_size=5), min_size=1, max_size=3),
)
def test_any_file_of_the_official_package_comes_back(
    arrays: dict[str, Array], metadata: dict[str, str] | None
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "a.safetensors")
        path.write_bytes(official_numpy.save(arrays, metadata))
        file = open_arrays(path)
        assert_same_as_official(path, file)
        for name, array in arrays.items():
            entry = file[name]
            assert (entry.dtype, entry.shape) == (array.dtype, array.shape)
            assert np.frombuffer(read(entry), entry.dtype).tobytes() == array.tobytes()
        assert [entry.start for entry in file.values()] == sorted(
            entry.start for entry in file.values()
        )


def test_the_dtypes_are_those_of_the_package(path: pathlib.Path) -> None:
    with pytest.raises(official.SafetensorError) as caught:
        official.deserialize(file_bytes(tensor("none")))
    listed = {word for word in str(caught.value).split("`") if word.isupper() or "_E" in word}
    assert listed <= ours.DTYPE_NAMES == WIDTHS.keys()


@pytest.mark.parametrize("name", sorted(WIDTHS))
@pytest.mark.parametrize("elements", [0, 1, 3, 4, 8])
def test_every_dtype_takes_the_bytes_the_package_says(
    path: pathlib.Path, name: str, elements: int
) -> None:
    bits = elements * WIDTHS[name]
    size = -(-bits // 8)
    path.write_bytes(file_bytes(tensor(name, f"[{elements}]", f"[0,{size}]"), bytes(range(size))))
    assert agrees_with_official(path) == (bits % 8 == 0)
    if bits % 8 == 0:
        entry = open_arrays(path)["a"]
        assert entry.packed == (WIDTHS[name] < 8)
        if entry.packed:
            assert entry.dtype == np.uint8
        else:
            assert entry.dtype.itemsize * elements == entry.nbytes


@pytest.mark.parametrize(
    ("name", "extension", "raw"),
    [
        ("BF16", "bfloat16", "<u2"),
        ("F8_E4M3", "float8_e4m3fn", "u1"),
        ("F8_E4M3FNUZ", "float8_e4m3fnuz", "u1"),
        ("F8_E5M2", "float8_e5m2", "u1"),
        ("F8_E5M2FNUZ", "float8_e5m2fnuz", "u1"),
        ("F8_E8M0", "float8_e8m0fnu", "u1"),
    ],
)
def test_types_numpy_lacks_are_those_of_ml_dtypes_or_raw(
    path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, name: str, extension: str, raw: str
) -> None:
    size = WIDTHS[name] // 8
    path.write_bytes(file_bytes(tensor(name, "[]", f"[0,{size}]"), bytes(size)))
    ours._element.cache_clear()
    ml_dtypes = pytest.importorskip("ml_dtypes")
    assert open_arrays(path)["a"].dtype == np.dtype(getattr(ml_dtypes, extension))
    ours._element.cache_clear()
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    assert open_arrays(path)["a"].dtype == np.dtype(raw)
    assert open_arrays(path)["a"].dtype_name == name
    ours._element.cache_clear()


# Damaged files


def sample() -> bytes:
    arrays = {
        "weight": np.arange(6, dtype="<f4").reshape(2, 3),
        "bias": np.arange(3, dtype="<i2"),
        "step": np.array(7, "<u8"),
        "none": np.zeros((0, 4), "<f2"),
    }
    return bytes(official_numpy.save(arrays, {"format": "np"}))


def test_with_any_header_byte_changed_gpuq_agrees_with_the_package(path: pathlib.Path) -> None:
    whole = sample()
    accepted = 0
    for position in range(8 + int.from_bytes(whole[:8], "little")):
        values = {whole[position] ^ 1 << bit for bit in range(8)} | set(b'\0 "0189[]{},-.\\\xff')
        for value in values:
            damaged = bytearray(whole)
            damaged[position] = value
            path.write_bytes(damaged)
            accepted += agrees_with_official(path)
    assert accepted > 100  # changed names and metadata: the comparison did compare


def test_a_file_cut_at_any_byte_is_named_as_truncated(path: pathlib.Path) -> None:
    whole = sample()
    header_end = 8 + int.from_bytes(whole[:8], "little")
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        expected = 8 if size < 8 else header_end if size < header_end else len(whole)
        message = refusal(path)
        assert "truncated" in message
        assert f"expected {expected} bytes" in message
        assert f"found {size}" in message
        assert not official_accepts(path)


def test_bytes_after_the_last_tensor_are_refused(path: pathlib.Path) -> None:
    whole = sample()
    path.write_bytes(whole + b"\0")
    message = refusal(path)
    assert f"expected {len(whole)} bytes, found {len(whole) + 1}" in message
    assert not official_accepts(path)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_with_random_damage_gpuq_agrees_with_the_package(data: st.DataObject) -> None:
    whole = bytearray(sample())
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, len(whole) - 1))
        whole[position] = data.draw(st.sampled_from(b'0123456789,:"[]{} aF\0\xff'))
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "a.safetensors")
        path.write_bytes(whole)
        agrees_with_official(path)


# Hostile headers

BOTH_REFUSE: dict[str, tuple[str | bytes, bytes]] = {
    "header of no bytes": (b"", b""),
    "not json": (b"{", b""),
    "a list": (b"[]", b""),
    "byte order mark": (b"\xef\xbb\xbf{}", b""),
    "trailing nul": (b"{}\0", b""),
    "trailing comma": (f'{{"a":{FOUR},}}', bytes(4)),
    "not utf-8": (b'{"\xff":' + FOUR.encode() + b"}", bytes(4)),
    "utf-8 surrogate": (b'{"\xed\xa0\x80":' + FOUR.encode() + b"}", bytes(4)),
    "escaped lone surrogate": (f'{{"\\ud800":{FOUR}}}', bytes(4)),
    "control character": (f'{{"\x01":{FOUR}}}', bytes(4)),
    "form feed for space": (f'{{"a":\f{FOUR}}}', bytes(4)),
    "metadata not strings": (b'{"__metadata__":{"a":1}}', b""),
    "metadata a list": (b'{"__metadata__":[]}', b""),
    "metadata twice": (b'{"__metadata__":{},"__metadata__":{}}', b""),
    "tensor null": (b'{"a":null}', b""),
    "no dtype": ('{"a":{"shape":[1],"data_offsets":[0,4]}}', bytes(4)),
    "no shape": ('{"a":{"dtype":"F32","data_offsets":[0,4]}}', bytes(4)),
    "no offsets": ('{"a":{"dtype":"F32","shape":[1]}}', bytes(4)),
    "unknown dtype": (tensor("F33"), bytes(4)),
    "lower-case dtype": (tensor("f32"), bytes(4)),
    "dtype twice": (tensor(more=',"dtype":"F32"'), bytes(4)),
    "shape of bools": (tensor(shape="[true]"), bytes(4)),
    "shape of floats": (tensor(shape="[1.0]"), bytes(4)),
    "shape with exponent": (tensor(shape="[1e0]"), bytes(4)),
    "shape of minus zero": (tensor(shape="[-0]", offsets="[0,0]"), b""),
    "shape negative": (tensor(shape="[-1,-1]"), bytes(4)),
    "shape with leading zero": (tensor(shape="[01]"), bytes(4)),
    "shape null": (tensor(shape="null"), bytes(4)),
    "shape an object": (tensor(shape="{}"), bytes(4)),
    "shape of lists": (tensor(shape="[[1]]"), bytes(4)),
    "shape beyond 64 bits": (tensor(shape="[18446744073709551616,0]", offsets="[0,0]"), b""),
    "shape that wraps to 1": (tensor(shape="[4294967296,4294967296,1]"), bytes(4)),
    "bytes that wrap to 4": (tensor(shape="[4611686018427387905]"), bytes(4)),
    "shape very long": (tensor(shape=f"[{'18446744073709551615,' * 50_000}1]"), bytes(4)),
    "too few bytes": (tensor(shape="[2]"), bytes(4)),
    "too many bytes": (tensor(shape="[1]", offsets="[0,8]"), bytes(8)),
    "one offset": (tensor(offsets="[0]"), bytes(4)),
    "three offsets": (tensor(offsets="[0,4,4]"), bytes(4)),
    "offsets reversed": (tensor(shape="[0]", offsets="[4,0]"), bytes(4)),
    "offsets of bools": (tensor("U8", offsets="[false,true]"), bytes(1)),
    "offsets at 2**64": (
        tensor(offsets="[18446744073709551611,18446744073709551615]"), bytes(4)),
    "gap before": (tensor(offsets="[4,8]"), bytes(8)),
    "data without tensors": (b"{}", bytes(1)),
    "same bytes twice": (f'{{"a":{FOUR},"b":{FOUR}}}', bytes(4)),
    "overlap": (f'{{"a":{FOUR},"b":{TWO % (3, 5)}}}', bytes(5)),
    "one inside another": (f'{{"a":{FOUR},"b":{TWO % (1, 3)}}}', bytes(4)),
    "gap between": (f'{{"a":{FOUR},"b":{TWO % (5, 7)}}}', bytes(7)),
    "empty tensor inside another": (f'{{"a":{FOUR},"b":{EMPTY % (2, 2)}}}', bytes(4)),
    "NaN": (tensor(more=',"x":NaN'), bytes(4)),
    "Infinity": (tensor(more=',"x":-Infinity'), bytes(4)),
    "float out of range": (tensor(more=',"x":1e999'), bytes(4)),
    "integer out of range": (tensor(more=f',"x":{"9" * 400}'), bytes(4)),
    "integer beyond Python's digits": (tensor(more=f',"x":{"9" * 5000}'), bytes(4)),
    "126 lists deep": (tensor(more=f',"x":{"[" * 126}{"]" * 126}'), bytes(4)),
    "5000 lists deep": (tensor(more=f',"x":{"[" * 5000}{"]" * 5000}'), bytes(4)),
    "a million lists deep": ('{"a":' + "[" * 1_000_000, b""),
    "100 000 objects deep": ('{"a":' * 100_000 + "1" + "}" * 100_000, b""),
}  # fmt: skip


@pytest.mark.parametrize("case", BOTH_REFUSE)
def test_gpuq_and_the_package_refuse(path: pathlib.Path, case: str) -> None:
    path.write_bytes(file_bytes(*BOTH_REFUSE[case]))
    assert not agrees_with_official(path)


BOTH_ACCEPT: dict[str, tuple[str | bytes, bytes]] = {
    "empty": (b"{}", b""),
    "padded": (b"{} \n\t\r", b""),
    "scalar": (tensor(shape="[]"), bytes(4)),
    "empty tensors at both ends": (
        f'{{"b":{EMPTY % (4, 4)},"a":{FOUR},"c":{EMPTY % (0, 0)}}}', bytes(4)),
    "not in order": (f'{{"b":{TWO % (2, 4)},"a":{TWO % (0, 2)}}}', b"abcd"),
    "unknown keys": (tensor(more=',"x":{"y":[1,null,true,1e300,-1,"z"]}'), bytes(4)),
    "125 lists deep": (tensor(more=f',"x":{"[" * 125}{"]" * 125}'), bytes(4)),
    "float of 5000 digits": (tensor(more=f',"x":0.{"9" * 5000}'), bytes(4)),
    "escapes": (f'{{"\\ud83d\\ude00\\u0000\\/":{FOUR}}}', bytes(4)),
    "escaped dtype": (tensor("\\u004632"), bytes(4)),
    "escaped metadata": (b'{"\\u005f_metadata__":{"a":"b"}}', b""),
    "empty name": (f'{{"":{FOUR}}}', bytes(4)),
    "65 dimensions": (tensor(shape=f"[{'1,' * 64}1]"), bytes(4)),
}  # fmt: skip


@pytest.mark.parametrize("case", BOTH_ACCEPT)
def test_gpuq_and_the_package_accept_the_same(path: pathlib.Path, case: str) -> None:
    path.write_bytes(file_bytes(*BOTH_ACCEPT[case]))
    assert agrees_with_official(path)


STRICTER: dict[str, tuple[str | bytes, bytes]] = {
    "space before the brace": (f' {{"a":{FOUR}}}', bytes(4)),
    "tensor twice": (f'{{"a":{FOUR},"a":{FOUR}}}', bytes(4)),
    "metadata key twice": (b'{"__metadata__":{"a":"b","a":"c"}}', b""),
    "unknown key twice": (tensor(more=',"x":1,"x":2'), bytes(4)),
    "metadata null": (b'{"__metadata__":null}', b""),
    "tensor a list": (b'{"a":["F32",[1],[0,4]]}', bytes(4)),
    "dtype an object": (
        '{"a":{"dtype":{"F32":null},"shape":[1],"data_offsets":[0,4]}}', bytes(4)),
    "no numpy shape": (tensor(shape="[4611686018427387904,2,0]", offsets="[0,0]"), b""),
}  # fmt: skip


@pytest.mark.parametrize("case", STRICTER)
def test_gpuq_refuses_what_only_the_package_takes(path: pathlib.Path, case: str) -> None:
    path.write_bytes(file_bytes(*STRICTER[case]))
    refusal(path)
    assert official_accepts(path)  # else the case belongs to BOTH_REFUSE, and in no doc


@pytest.mark.parametrize("length", [100_000_001, 1 << 40, 2**63, 2**64 - 1])
def test_a_huge_header_length_is_refused_before_it_is_allocated(
    path: pathlib.Path, length: int
) -> None:
    path.write_bytes(length.to_bytes(8, "little"))
    with path.open("r+b") as file:
        file.truncate(1 << 42)
    assert f"at most 100000000 bytes of header, found {length}" in refusal(path)


def test_a_header_length_beyond_the_file_is_refused_before_it_is_allocated(
    path: pathlib.Path,
) -> None:
    path.write_bytes((100_000_000).to_bytes(8, "little") + b"{}")
    assert "expected 100000008 bytes or more, found 10" in refusal(path)


def test_a_header_that_memory_cannot_hold_is_a_format_error(
    path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exhausted(*_: object, **__: object) -> None:
        raise MemoryError

    path.write_bytes(file_bytes(b"{}", b""))
    monkeypatch.setattr("json.loads", exhausted)
    assert "expected JSON that fits in memory, found 2 bytes" in refusal(path)


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (tensor("F33"), "tensor 'a': dtype: expected one of BF16, BOOL, "),
        (tensor(shape="[2]"), "tensor 'a': data_offsets: expected 8 bytes for [2] of F32, found 4"),
        (tensor("F4", "[7]"), "tensor 'a': expected whole bytes, found 28 bits of F4"),
        (tensor(offsets="[1,5]"), "tensor 'a': gap: expected begin 0, found 1"),
        (f'{{"a":{FOUR},"b":{FOUR}}}', "tensor 'b': overlap: expected begin 4, found 0"),
        (tensor(shape="[4294967296,4294967296]"), "tensor 'a': expected at most 2**63 - 1 bytes"),
        (f'{{"a":{FOUR},"a":{FOUR}}}', "header: expected UTF-8 JSON, found key 'a' twice"),
    ],
)
def test_messages_name_the_tensor_what_was_expected_and_what_was_found(
    path: pathlib.Path, header: str, expected: str
) -> None:
    path.write_bytes(file_bytes(header))
    assert expected in refusal(path)
