"""What can be opened and registered, how a file will be read, and how a refusal is told."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernels import Compiled

import gpuq
from gpuq.host import direct_file
from gpuq.host.direct_file import ENDED, ENOUGH, RESUME, judge_read, span_bytes, span_start
from gpuq.layout import Status

MakeLoader = Callable[..., gpuq.Loader]


@pytest.fixture
def loader(make_loader: MakeLoader) -> gpuq.Loader:
    return make_loader(sources=3, destinations=3)


def open_descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


# --- refusals ------------------------------------------------------------------------------


def test_a_missing_path_is_the_systems_error_and_names_it(
    loader: gpuq.Loader, tmp_path: Path
) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        loader.open(tmp_path / "absent")
    assert caught.value.filename == str(tmp_path / "absent")


def test_a_directory_is_the_systems_error_and_names_it(loader: gpuq.Loader, tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError) as caught:
        loader.open(tmp_path)
    assert caught.value.filename == str(tmp_path)


def test_an_unreadable_file_is_the_systems_error_and_names_it(
    loader: gpuq.Loader, tmp_path: Path
) -> None:
    path = tmp_path / "secret"
    path.write_bytes(b"x")
    path.chmod(0)
    if os.access(path, os.R_OK):
        pytest.skip("this user reads everything")
    with pytest.raises(PermissionError) as caught:
        loader.open(path)
    assert caught.value.filename == str(path)


def test_a_fifo_is_refused_and_does_not_block(loader: gpuq.Loader, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(gpuq.SourceError, match="neither a regular file nor a block device"):
        loader.open(tmp_path / "fifo")


def test_a_character_device_is_refused(loader: gpuq.Loader) -> None:
    with pytest.raises(gpuq.SourceError, match="/dev/zero: neither a regular file"):
        loader.open("/dev/zero")


def test_a_file_whose_size_cannot_be_asked_is_an_error_that_names_it(loader: gpuq.Loader) -> None:
    # lseek(2) to the end of /proc/version fails, and Python's error for it has no filename.
    with pytest.raises(OSError, match="/proc/version") as caught:
        loader.open("/proc/version")
    assert caught.value.filename == "/proc/version"


@pytest.mark.parametrize("path", ["absent", "directory", "fifo", "/dev/zero", "/proc/version"])
@pytest.mark.parametrize("direct", ["auto", "require", "off"])
def test_a_refused_path_leaves_no_descriptor(
    loader: gpuq.Loader, tmp_path: Path, path: str, direct: str
) -> None:
    (tmp_path / "directory").mkdir()
    os.mkfifo(tmp_path / "fifo")
    before = open_descriptors()
    with pytest.raises((OSError, gpuq.SourceError)):
        loader.open(tmp_path / path, direct=direct)
    assert open_descriptors() == before


def test_too_many_sources_are_refused_and_a_closed_one_makes_room(
    loader: gpuq.Loader, payload_path: Path
) -> None:
    sources = [loader.open(payload_path) for _ in range(3)]
    before = open_descriptors()
    with pytest.raises(gpuq.SourceError, match="3 sources are open already"):
        loader.open(payload_path)
    assert open_descriptors() == before
    sources[1].close()
    assert loader.open(payload_path).is_open


@pytest.mark.parametrize(
    ("start", "end"), [(-1, None), (5, 4), (0, (1 << 62) + 1), ((1 << 62) + 1, None), (0, -1)]
)
def test_a_range_that_is_none_is_refused(
    loader: gpuq.Loader, payload_path: Path, start: int, end: int | None
) -> None:
    before = open_descriptors()
    with pytest.raises(gpuq.SourceError, match="range"):
        loader.open(payload_path, start=start, end=end)
    assert open_descriptors() == before


def test_an_unknown_mode_is_refused(loader: gpuq.Loader, payload_path: Path) -> None:
    with pytest.raises(gpuq.ConfigError, match="auto, require, off"):
        loader.open(payload_path, direct="maybe")


def test_symbolic_links_and_path_objects_work(
    loader: gpuq.Loader, payload_path: Path, tmp_path: Path
) -> None:
    (tmp_path / "link").symlink_to(payload_path)
    for path in (tmp_path / "link", str(tmp_path / "link")):
        with loader.open(path) as source:
            assert source.size == 100_003
            assert source.path == str(tmp_path / "link")


def test_a_path_of_bytes_is_text_in_what_is_said_of_it(
    make_loader: MakeLoader, payload_path: Path, tmp_path: Path
) -> None:
    """The trace of such a source could not be saved, and formats could not judge its suffix."""
    odd = os.fsencode(tmp_path) + b"/\xff.npy"
    np.save(os.fsdecode(odd), np.arange(5))
    loader = make_loader(trace=8)
    source = loader.open(os.fsencode(payload_path))
    assert source.path == str(payload_path)
    loader.read(source, 0, 8)
    np.testing.assert_array_equal(*loader.load(odd).values(), np.arange(5))
    gpuq.trace.save(loader.trace(), tmp_path / "trace")
    paths = set(gpuq.trace.load(tmp_path / "trace").sources.values())
    assert paths == {str(payload_path), os.fsdecode(odd)}


# --- direct or not ---------------------------------------------------------------------------


def test_a_file_system_that_refuses_o_direct_at_open(loader: gpuq.Loader) -> None:
    # sysfs is one on every Linux.
    path = next((p for p in Path("/sys/kernel").glob("*") if p.is_file() and os.access(p, 4)), None)
    if path is None:
        pytest.skip("no readable file in /sys/kernel here")
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
        pytest.skip("sysfs takes O_DIRECT here")
    except OSError:
        pass
    before = open_descriptors()
    with pytest.raises(gpuq.DirectUnavailableError, match=r"direct reads were required.*EINVAL"):
        loader.open(path, direct="require")
    assert open_descriptors() == before
    with loader.open(path, direct="auto") as source:
        explanation = loader.explain(source)
        assert not explanation.direct
        assert "EINVAL" in explanation.reason
        content = path.read_bytes()
        array = np.zeros(4096, dtype=np.uint8)
        destination = loader.register(array)
        q, s, d = loader.queue, source.handle, destination.handle
        assert Compiled.pull(q, s, d, 0, len(content), 0) == Status.OK
        assert array.tobytes()[: len(content)] == content
        # sysfs says 4096 bytes, whatever the file holds.
        assert Compiled.pull(q, s, d, 0, len(content) + 1, 0) == Status.END_OF_FILE


def refuse_by_statx(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(direct_file, "statx_alignment", lambda descriptor: (0, 0))
    return "statx STATX_DIOALIGN is 0"


def refuse_at_the_first_read(monkeypatch: pytest.MonkeyPatch) -> str:
    refusal = OSError(errno.EINVAL, "refused")
    monkeypatch.setattr(direct_file, "_try_direct_read", lambda *arguments: refusal)
    return "a first read with O_DIRECT failed: EINVAL"


def refuse_by_alignment(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(direct_file, "statx_alignment", lambda descriptor: (512, 8192))
    return "offsets to 8192 bytes"


def refuse_by_memory_alignment(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(direct_file, "statx_alignment", lambda descriptor: (8192, 512))
    return "memory aligned to 8192"


def test_an_alignment_that_is_no_power_of_two_is_refused(
    make_loader: MakeLoader, payload_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct_file, "statx_alignment", lambda descriptor: (512, 1536))
    loader = make_loader(staging_bytes=12288)
    with pytest.raises(gpuq.DirectUnavailableError, match="offsets to 1536 bytes"):
        loader.open(payload_path, direct="require")


@pytest.mark.parametrize(
    "refuse",
    [refuse_by_statx, refuse_at_the_first_read, refuse_by_alignment, refuse_by_memory_alignment],
)
def test_a_refusal_falls_back_with_its_reason_or_raises_it(
    loader: gpuq.Loader, payload_path: Path, payload: Any, monkeypatch: Any, refuse: Any
) -> None:
    reason = refuse(monkeypatch)
    before = open_descriptors()
    with pytest.raises(gpuq.DirectUnavailableError) as caught:
        loader.open(payload_path, direct="require")
    assert reason in str(caught.value)
    assert str(payload_path) in str(caught.value)
    assert open_descriptors() == before
    source = loader.open(payload_path)
    explanation = loader.explain(source)
    assert (explanation.direct, explanation.alignment) == (False, 1)
    assert reason in explanation.reason
    array = np.zeros(9000, dtype=np.uint8)
    destination = loader.register(array)
    q = loader.queue
    assert Compiled.pull(q, source.handle, destination.handle, 77, 9077, 0) == Status.OK
    np.testing.assert_array_equal(array, payload[77:9077])
    source.close()
    assert open_descriptors() == before


def test_a_retry_stays_aligned_in_memory_where_memory_needs_more_than_offsets(
    loader: gpuq.Loader, payload_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A short read is read on from an aligned offset into the same place of the buffer, so the
    # place must be aligned as memory, too.
    monkeypatch.setattr(direct_file, "statx_alignment", lambda descriptor: (4096, 512))
    source = loader.open(payload_path)
    assert loader.explain(source).alignment % 4096 == 0


def test_off_means_buffered(loader: gpuq.Loader, payload_path: Path) -> None:
    source = loader.open(payload_path, direct="off")
    assert loader.explain(source).direct is False
    assert 'direct="off"' in loader.explain(source).reason


def test_explain_says_reader_target_and_why(loader: gpuq.Loader, payload_path: Path) -> None:
    source = loader.open(payload_path)
    text = str(loader.explain(source))
    assert str(payload_path) in text
    assert "reader" in text
    assert "target cpu" in text
    source.close()
    with pytest.raises(gpuq.SourceError, match="not open in this loader"):
        loader.explain(source)


def test_explain_of_another_loaders_source_is_refused(
    make_loader: MakeLoader, payload_path: Path
) -> None:
    one, other = make_loader(), make_loader()
    source = one.open(payload_path)
    other.open(payload_path)
    with pytest.raises(gpuq.SourceError):
        other.explain(source)


# --- destinations ----------------------------------------------------------------------------


def read_only() -> Any:
    array = np.zeros(8, dtype=np.uint8)
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("array", "reason"),
    [
        (read_only(), "read-only"),
        (np.zeros((4, 4))[:, 1], "not C-contiguous"),
        (np.asfortranarray(np.zeros((4, 5))), "not C-contiguous"),
        (np.zeros(8)[::-1], "not C-contiguous"),
        (np.array([object()]), "Python objects"),
        (bytearray(8), "must be a NumPy array"),
        ([1, 2], "must be a NumPy array"),
        (None, "must be a NumPy array"),
    ],
    ids=str,
)
def test_what_cannot_be_a_destination_is_refused(
    loader: gpuq.Loader, array: Any, reason: str
) -> None:
    with pytest.raises(gpuq.DestinationError, match=reason):
        loader.register(array)


def test_too_many_destinations_are_refused_and_an_unregistered_one_makes_room(
    loader: gpuq.Loader,
) -> None:
    made = [loader.register(np.zeros(8)) for _ in range(3)]
    with pytest.raises(gpuq.DestinationError, match="3 destinations are registered already"):
        loader.register(np.zeros(8))
    loader.unregister(made[0])
    assert not made[0].is_registered
    assert loader.register(np.zeros(8)).is_registered


def test_a_registered_array_is_kept_alive_until_it_is_unregistered(loader: gpuq.Loader) -> None:
    import weakref

    class Watched(np.ndarray):
        pass

    array = np.zeros(100, dtype=np.uint8).view(Watched)
    alive = weakref.ref(array)
    destination = loader.register(array)
    handle = destination.handle
    del array
    assert alive() is not None
    destination.unregister()
    del destination
    loader.register(np.zeros(8))  # forgets what is unregistered
    assert alive() is None
    assert handle > 0


# --- arithmetic ------------------------------------------------------------------------------

ALIGNMENTS = st.sampled_from([1, 512, 4096, 65_536])


@given(
    start=st.integers(0, 1 << 62), size=st.integers(1, 1 << 40), alignment=ALIGNMENTS,
    blocks=st.integers(1, 64),
)  # fmt: skip
def test_spans_are_aligned_and_cover_what_they_must(
    start: int, size: int, alignment: int, blocks: int
) -> None:
    end = min(start + size, 1 << 62)
    most = blocks * alignment
    begin = span_start(start, alignment)
    length = span_bytes(start, end, alignment, most)
    assert begin % alignment == 0
    assert length % alignment == 0
    assert begin <= start < begin + alignment
    if end > start:
        assert 0 < length <= most
        assert begin + length > start
    # Either all of it in one piece, with less than a block too much, or as much as fits.
    assert length == most or end <= begin + length < end + alignment


@given(
    resumed=st.integers(0, 9000), got=st.integers(0, 9000), filled=st.integers(0, 9000),
    needed=st.integers(1, 9000),
)  # fmt: skip
def test_a_read_is_enough_or_progress_or_the_end(
    resumed: int, got: int, filled: int, needed: int
) -> None:
    verdict = judge_read(resumed, got, filled, needed)
    if resumed + got >= needed:
        assert verdict == ENOUGH
    elif resumed + got > filled:
        assert verdict == RESUME
    else:
        assert verdict == ENDED


def test_statx_says_what_the_kernel_says(payload_path: Path) -> None:
    with payload_path.open("rb") as file:
        said = direct_file.statx_alignment(file.fileno())
    if said is None:
        pytest.skip("this kernel or file system does not say STATX_DIOALIGN")
    memory, offset = said
    for number in (memory, offset):
        assert number == 0 or number & (number - 1) == 0
