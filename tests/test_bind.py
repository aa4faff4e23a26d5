"""Bound functions: what they ask for, in every form, and what `Loader.bind` finds by name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stepping import bare_queue
from targets import everywhere, open_loader, run_in_the_simulator

import gpuq
from gpuq import kernels
from gpuq.layout import DESTINATION, END, OFFSET, OPTIONS, SOURCE, START, TAG, State, Status

FORMS = [
    getattr(kernels, name)
    for name in kernels.__all__
    if name.startswith(("post", "pull", "try_post")) and name != "post_gather"
]
NO_FORMS = [gpuq.wait, gpuq.poll_counter, gpuq.gather, gpuq.stream_open_from, gpuq.bind, len]


@pytest.mark.parametrize("function", FORMS, ids=lambda function: function.__name__)
def test_a_bound_function_asks_for_what_the_whole_one_would(function: Any) -> None:
    q = bare_queue(2, state=State.ABORTED)
    bound = gpuq.bind(function, source=11, destination=22, tag=33)
    has_counter = "counted" in function.__name__
    has_offset = function.__name__.endswith("_at")
    bound(q, *([3] if has_counter else []), *([44] if has_offset else []), 55, 66)
    words = [int(q.submissions[word]) for word in (SOURCE, DESTINATION, OFFSET, START, END, TAG)]
    assert words == [11, 22, 44 if has_offset else 0, 55, 66, 33]
    assert int(q.submissions[OPTIONS]) == (4 if has_counter else 0)


@pytest.mark.parametrize("function", NO_FORMS, ids=lambda function: function.__name__)
def test_what_asks_for_no_bytes_cannot_be_bound(function: Any) -> None:
    with pytest.raises(TypeError, match=f"{function.__name__} takes no source"):
        gpuq.bind(function, source=1, destination=2)


class Files:
    """A loader with two files and two destinations of names."""

    def __init__(self, loader: gpuq.Loader, folder: Path) -> None:
        self.loader = loader
        self.data = {}
        for name in ("first", "second"):
            self.data[name] = np.frombuffer((name * 20).encode(), np.uint8)
            self.data[name].tofile(folder / name)
            loader.open(folder / name, name=name)
        self.arrays = {name: np.zeros(60, np.uint8) for name in ("tile", "other tile")}
        for name, array in self.arrays.items():
            loader.register(array, name=name)


@pytest.fixture
def files(tmp_path: Path) -> Iterator[Files]:
    with open_loader() as loader:
        yield Files(loader, tmp_path)


def make_body(pull: Any, pull_elsewhere: Any) -> Any:
    """One kernel, bound to whatever is given."""

    def body(index, size, q, statuses):
        statuses[0] = pull(q, 2, 12)
        statuses[1] = pull_elsewhere(q, 20, 12, 22)

    return body


@everywhere
def test_one_kernel_bound_twice_reads_two_files(files: Files) -> None:
    loader = files.loader
    for name, other in (("first", "second"), ("second", "first")):
        body = make_body(
            loader.bind(source=name),
            loader.bind(gpuq.pull_at, source=other, destination="other tile", tag=5),
        )
        statuses = np.full(2, -1, np.int64)
        loader.launch(body, 1, loader.queue, statuses)
        loader.synchronize()
        assert list(statuses) == [Status.OK] * 2
        np.testing.assert_array_equal(files.arrays["tile"][:10], files.data[name][2:12])
        arrived = files.arrays["other tile"]
        np.testing.assert_array_equal(arrived[20:30], files.data[other][12:22])
        assert not arrived[:20].any()


def bound_to(loader: gpuq.Loader, **given: Any) -> tuple[int, int]:
    """Return source and destination that a bound function asks for."""
    q = bare_queue(1)
    loader.bind(gpuq.try_post, **given)(q, 0, 1)
    return int(q.submissions[SOURCE]), int(q.submissions[DESTINATION])


def test_what_is_not_said_is_the_first_that_is_open(files: Files) -> None:
    sources = list(files.loader._sources.values())
    destinations = list(files.loader._destinations.values())
    assert bound_to(files.loader) == (sources[0].handle, destinations[0].handle)
    sources[0].close()
    destinations[0].unregister()
    assert bound_to(files.loader) == (sources[1].handle, destinations[1].handle)


@pytest.mark.parametrize("how", ["name", "object", "handle"])
def test_a_name_an_object_and_a_handle_mean_the_same(files: Files, how: str) -> None:
    source = next(s for s in files.loader._sources.values() if s.name == "second")
    destination = next(d for d in files.loader._destinations.values() if d.name == "other tile")
    given = {
        "name": (source.name, destination.name),
        "object": (source, destination),
        "handle": (source.handle, destination.handle),
    }[how]
    handles = (source.handle, destination.handle)
    assert bound_to(files.loader, source=given[0], destination=given[1]) == handles


def test_a_name_that_says_nothing_is_refused(files: Files, tmp_path: Path) -> None:
    loader = files.loader
    with pytest.raises(gpuq.SourceError, match=r"no source is named 'third'.*'first', 'second'"):
        loader.bind(source="third")
    with pytest.raises(gpuq.DestinationError, match=r"no destination is named 'third'.*'tile'"):
        loader.bind(destination="third")
    # A name for two files would read either.
    again = loader.open(tmp_path / "first", name="second")
    with pytest.raises(gpuq.SourceError, match="2 sources are named 'second'"):
        loader.bind(source="second")
    again.close()
    assert bound_to(loader, source="second")
    for source in list(loader._sources.values()):
        source.close()
    with pytest.raises(gpuq.SourceError, match="no source is open"):
        loader.bind()


def hand_over(index, size, q, given):
    pass


@everywhere
def test_what_another_loader_gave_out_is_refused(files: Files, tmp_path: Path) -> None:
    """Handles of two loaders are alike: a kernel of one read a file of the other, and said OK."""
    ours = files.loader
    with open_loader() as other:
        source = other.open(tmp_path / "first")
        destination = other.register(np.zeros(60, np.uint8))
        array = other.open_arrays(tmp_path / "first")["first"]
        stream = other.stream(source, 4)
        own = next(iter(ours._sources.values()))
        assert own.handle == source.handle
        for given in (source, array):
            for call in (
                lambda given=given: ours.bind(source=given),
                lambda given=given: ours.stream(given, 4),
                lambda given=given: ours.table(given, next(iter(ours._destinations.values())), 4),
                lambda given=given: ours.launch(hand_over, 1, ours.queue, given),
            ):
                with pytest.raises(gpuq.SourceError, match="is another loader's"):
                    call()
        for call in (
            lambda: ours.bind(destination=destination),
            lambda: ours.table(own, destination, 4),
            lambda: ours.launch(hand_over, 1, ours.queue, destination),
            lambda: ours.launch(hand_over, 1, ours.queue, stream),
        ):
            with pytest.raises(gpuq.DestinationError, match="is another loader's"):
                call()


def test_a_tag_or_a_handle_that_is_no_word_is_refused() -> None:
    for tag in (1 << 64, -(1 << 63) - 1):
        with pytest.raises(ValueError, match="a tag has 64 bits"):
            gpuq.bind(source=1, destination=2, tag=tag)
    for given in ({"source": 1.5}, {"destination": None}, {"tag": "7"}):
        with pytest.raises(TypeError, match="integer"):
            gpuq.bind(**{"source": 1, "destination": 2} | given)  # type: ignore[arg-type]


def test_a_bound_function_outlives_its_file_and_reads_nothing(files: Files) -> None:
    body = make_body(
        files.loader.bind(source="first"),
        files.loader.bind(gpuq.pull_at, source="second", destination="other tile"),
    )
    next(iter(files.loader._sources.values())).close()
    statuses = np.full(2, -1, np.int64)
    files.loader.launch(body, 1, files.loader.queue, statuses)
    files.loader.synchronize()
    assert list(statuses) == [Status.BAD_SOURCE, Status.OK]
    assert not files.arrays["tile"].any()


def test_marked_tests_hold_in_the_simulator() -> None:
    run_in_the_simulator(__file__, __name__)
