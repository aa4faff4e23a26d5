"""What `Loader.trace` gives, and what files, figures and pictures make of it."""

from __future__ import annotations

import contextlib
import csv
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gpuq
from gpuq.host.taken import join
from gpuq.host.tracing import BY_DIRECT_READ, BY_NEIGHBOURS_READ, FIELDS, READ_ON, TRACE_DTYPE
from gpuq.layout import Status
from gpuq.testing import readers
from gpuq.trace import phases, picture

MakeLoader = Callable[..., gpuq.Loader]


def record(ticket: int = 0, **fields: int) -> tuple[int, ...]:
    """Return a record of a request that took 100 ns; what is not given is as for a good one."""
    good = {
        "ticket": ticket, "source": 1 << 32, "end": 10, "admitted_ns": 1000, "first_read_ns": 1010,
        "last_read_ns": 1060, "copy_ns": 1070, "completed_ns": 1100, "bytes": 10, "reads": 1,
        "path": BY_DIRECT_READ,
    }  # fmt: skip
    return tuple((good | fields).get(name, 0) for name in FIELDS)


REFUSED = {
    "status": int(Status.BAD_SOURCE), "first_read_ns": 0, "last_read_ns": 0, "copy_ns": 0,
    "bytes": 0, "reads": 0, "path": 0,
}  # fmt: skip


def made_of(*records: tuple[int, ...], lost: int = 0, path: str = "a.bin") -> gpuq.Trace:
    return gpuq.Trace(np.array(list(records), TRACE_DTYPE), {1 << 32: path}, lost, "cpu", "threads")


# --- the loader ----------------------------------------------------------------------------


def test_a_loader_without_a_trace_says_how_to_get_one(make_loader: MakeLoader) -> None:
    with pytest.raises(gpuq.ConfigError, match=r"keeps no trace.*Loader\(trace="):
        make_loader().trace()


def test_each_call_takes_what_was_answered_since(
    make_loader: MakeLoader, payload_path: Path
) -> None:
    loader = make_loader(trace=64)
    first, second = loader.open(payload_path), loader.open(payload_path)
    loader.read(first, 0, 100)
    first.close()
    loader.read(second, 7, 5_000)
    trace = loader.trace()
    assert trace.sources == {first.handle: str(payload_path), second.handle: str(payload_path)}
    assert trace.records["bytes"].tolist() == [100, 4_993]
    assert (trace.lost, trace.target, len(trace)) == (0, "cpu", 2)
    assert trace.reader in ("io_uring", "threads")
    assert len(loader.trace()) == 0
    loader.read(second, 0, 1)
    loader.close()
    last = loader.trace()
    assert (len(last), last.sources) == (1, {second.handle: str(payload_path)})


def test_what_was_lost_is_told_once(make_loader: MakeLoader, payload_path: Path) -> None:
    loader = make_loader(trace=2)
    source = loader.open(payload_path)
    traces = []
    for count in (5, 1):
        for _ in range(count):
            loader.read(source, 0, 1)
        traces.append(loader.trace())
    assert [(len(trace), trace.lost) for trace in traces] == [(2, 3), (1, 0)]
    both = join(traces)
    assert (len(both), both.lost, both.sources) == (3, 3, traces[0].sources)
    assert repr(both) == "<gpuq.Trace of 3 requests, 3 lost>"


def test_paths_of_closed_sources_are_forgotten_in_the_end(
    make_loader: MakeLoader, payload_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpuq.registry._CLOSED_PATHS", 2)
    loader = make_loader(trace=64, sources=2)
    kept = loader.open(payload_path)
    for _ in range(20):
        with loader.open(payload_path) as source:
            loader.read(source, 0, 1)
    loader.read(kept, 0, 1)
    trace = loader.trace()
    assert len(trace) == 21
    assert len(trace.sources) == 4
    assert {kept.handle, source.handle} <= set(trace.sources)


def test_a_failed_read_is_in_the_trace_and_read_on(make_scripted: Any) -> None:
    script = [(readers.READ, 512), (readers.READ, -1), (readers.FAIL, 5)]
    loader, _ = make_scripted(np.arange(4096, dtype=np.uint8), script, trace=8)
    source = loader.open(__file__)
    loader.read(source, 0, 1000)
    with pytest.raises(gpuq.ReadError):
        loader.read(source, 0, 1000)
    good, bad = loader.trace().records
    assert good["path"] & READ_ON
    assert (bad["status"], bad["errno"], bad["bytes"]) == (Status.READ_FAILED, 5, 0)


# --- phases --------------------------------------------------------------------------------


def test_a_step_that_did_not_happen_ends_with_the_request() -> None:
    failed = {"copy_ns": 0, "status": int(Status.READ_FAILED)}
    records = made_of(record(), record(**failed), record(**REFUSED)).records
    assert np.diff(phases.steps_of(records), axis=1).tolist() == [
        [10, 50, 10, 30],
        [10, 50, 40, 0],
        [100, 0, 0, 0],
    ]
    assert phases.was_read(records).tolist() == [True, True, False]


spans = st.lists(
    st.tuples(st.integers(1, 50), st.integers(0, 30)).map(lambda s: (s[0], s[0] + s[1])),
    max_size=20,
)


@given(spans=spans)
def test_the_depth_is_what_counting_gives(spans: list[tuple[int, int]]) -> None:
    records = made_of(*(record(admitted_ns=a, completed_ns=b) for a, b in spans)).records
    times, depths = phases.depths_of(records)
    assert times.tolist() == sorted({time for span in spans for time in span})
    for time, depth in zip(times, depths, strict=True):
        assert depth == sum(first <= time < last for first, last in spans)


# --- files ---------------------------------------------------------------------------------


def same(one: gpuq.Trace, other: gpuq.Trace) -> bool:
    keys = ("sources", "lost", "target", "reader")
    return np.array_equal(one.records, other.records) and all(
        getattr(one, key) == getattr(other, key) for key in keys
    )


@pytest.mark.parametrize("trace", [
    made_of(record(0), record(1, tag=-1), lost=7, path="odd \udcff\n\x1b name"),
    made_of(),
])  # fmt: skip
def test_a_trace_is_the_same_out_of_its_file(trace: gpuq.Trace, tmp_path: Path) -> None:
    path = tmp_path / "no ending"
    gpuq.trace.save(trace, path)
    assert same(gpuq.trace.load(path), trace)


def test_a_missing_file_is_the_systems_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        gpuq.trace.load(tmp_path / "absent")


def broken_files(folder: Path) -> dict[str, bytes]:
    """Return files that are no traces, by what is wrong with them."""
    good = folder / "good"
    gpuq.trace.save(made_of(*(record(n, tag=n * n) for n in range(100))), good)
    whole = good.read_bytes()
    damaged = bytearray(whole)
    damaged[100:110] = bytes(10)
    # Where an entry of the archive's directory has its flags, and the place of its file.
    entry = whole.index(b"PK\x01\x02")
    encrypted, misplaced = bytearray(whole), bytearray(whole)
    encrypted[entry + 8] |= 1
    encrypted[whole.index(b"PK\x03\x04") + 6] |= 1
    misplaced[-6:-2] = b"\xff\xff\xff\x7f"  # of the directory itself

    def archive(**arrays: Any) -> bytes:
        with open(folder / "made", "wb") as file:
            np.savez(file, **arrays)
        return (folder / "made").read_bytes()

    about = {"gpuq_trace": 1, "target": "cpu", "reader": "threads", "lost": 0, "sources": {}}
    records = made_of(record()).records
    text = np.array(json.dumps(about))
    return {
        "empty": b"",
        "text": b"ticket,tag\n",
        "half": whole[: len(whole) // 2],
        "damaged": bytes(damaged),
        "encrypted": bytes(encrypted),
        "misplaced": bytes(misplaced),
        "deep": archive(records=records, about=np.array("[" * 100_000)),
        "another archive": archive(x=np.zeros(3)),
        "objects": archive(records=np.array([{}], object), about=text),
        "no text": archive(records=records, about=np.zeros(3)),
        "a list": archive(records=records, about=np.array("[]")),
        "a later version": archive(
            records=records, about=np.array(json.dumps(about | {"gpuq_trace": 2}))
        ),
        "other fields": archive(records=np.zeros(3), about=text),
        "two dimensions": archive(records=records[None], about=text),
        "backwards": archive(records=made_of(record(completed_ns=5)).records, about=text),
        "no sources": archive(records=records, about=np.array(json.dumps(about | {"sources": 3}))),
    }


def test_whatever_byte_of_a_trace_is_damaged_it_is_refused_or_read(tmp_path: Path) -> None:
    """A flag that says encrypted, a place that cannot be: these came as other errors."""
    path = tmp_path / "trace"
    gpuq.trace.save(made_of(record()), path)
    whole = path.read_bytes()
    refused = 0
    for position in range(len(whole)):
        damaged = bytearray(whole)
        damaged[position] ^= 0xFF
        path.write_bytes(damaged)
        try:
            gpuq.trace.load(path)
        except gpuq.FormatError:
            refused += 1
    assert refused > len(whole) // 2


def test_what_is_no_trace_is_refused_in_one_line_that_names_it(tmp_path: Path) -> None:
    for name, content in broken_files(tmp_path).items():
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(gpuq.FormatError) as caught:
            gpuq.trace.load(path)
        assert str(caught.value).startswith(f"{path}: this is no trace"), name
        assert "\n" not in str(caught.value)


@given(data=st.data())
@settings(max_examples=100)
def test_no_damage_ends_in_another_error(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("damage") / "t.npz"
    gpuq.trace.save(made_of(record()), path)
    content = bytearray(path.read_bytes())
    for place in data.draw(st.lists(st.integers(0, len(content) - 1), min_size=1, max_size=4)):
        content[place] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    with contextlib.suppress(gpuq.FormatError):
        gpuq.trace.load(path)


def test_csv_has_each_field_and_its_name(tmp_path: Path) -> None:
    trace = made_of(record(5, tag=-3), record(6, **REFUSED | {"source": 99}), lost=4, path="a,b\n")
    gpuq.trace.write_csv(trace, tmp_path / "t.csv")
    with open(tmp_path / "t.csv", newline="") as file:
        good, refused = csv.DictReader(file)
    for name in FIELDS:
        assert [good[name], refused[name]] == [str(int(n)) for n in trace.records[name]]
    assert (good["source_path"], refused["source_path"]) == ("a,b\n", "handle 0x63")
    assert (good["status_name"], refused["status_name"]) == ("OK", "BAD_SOURCE")
    assert (good["path_name"], refused["path_name"]) == ("direct", "no read")
    assert good["lost"] == refused["lost"] == "4"


# --- Perfetto ------------------------------------------------------------------------------


def events_of(trace: gpuq.Trace, folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    gpuq.trace.write_perfetto(trace, folder / "t.json")
    document = json.loads((folder / "t.json").read_text())
    return document, document["traceEvents"]


def ns(microseconds: float) -> int:
    return round(microseconds * 1000)


NEEDED = {
    "M": {"ph", "name", "pid", "tid", "args"},
    "C": {"ph", "name", "pid", "ts", "args"},
    "i": {"ph", "name", "pid", "tid", "ts", "s"},
    "X": {"ph", "name", "pid", "tid", "ts", "dur", "cat"},
}
"""Fields of each kind of event that we write, by the documented Trace Event Format."""


@given(spans=st.lists(st.tuples(st.integers(1, 50), st.integers(0, 30)), max_size=20))
@settings(max_examples=30)
def test_perfetto_has_each_request_whole_on_a_lane_of_its_source(
    tmp_path_factory: pytest.TempPathFactory, spans: list[tuple[int, int]]
) -> None:
    records = [
        record(n, admitted_ns=a, first_read_ns=a + b // 3, completed_ns=a + b, source=n % 2)
        for n, (a, b) in enumerate(spans)
    ]  # fmt: skip
    _, events = events_of(made_of(*records), tmp_path_factory.mktemp("perfetto"))
    for event in events:
        assert NEEDED[event["ph"]] <= set(event)
        assert ns(event.get("ts", 0)) >= 0
    slices = [event for event in events if event["ph"] == "X"]
    requests = [event for event in slices if event["cat"] == "request"]
    assert sorted(event["args"]["ticket"] for event in requests) == list(range(len(spans)))
    begin = min((a for a, _ in spans), default=0)
    inside: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for event in requests:
        a, b = spans[event["args"]["ticket"]]
        assert (ns(event["ts"]), ns(event["dur"])) == (a - begin, b)
        mine = (ns(event["ts"]), ns(event["ts"]) + ns(event["dur"]))
        lane = inside.setdefault((event["pid"], event["tid"]), [])
        # Slices of one thread may only nest; two requests never do.
        assert all(mine[0] >= last or mine[1] <= first for first, last in lane)
        lane.append(mine)
    for event in slices:
        if event["cat"] == "phase":
            first, last = ns(event["ts"]), ns(event["ts"]) + ns(event["dur"])
            lane = inside[event["pid"], event["tid"]]
            assert any(a <= first and last <= b for a, b in lane)
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert named == set(inside)


def test_perfetto_says_names_phases_and_what_was_lost(tmp_path: Path) -> None:
    big = 1 << 60
    trace = made_of(record(0, tag=big), record(1, **REFUSED), lost=2, path="odd \udcff.bin")
    document, events = events_of(trace, tmp_path)
    assert document["otherData"] == {"lost": 2, "target": "cpu", "reader": "threads"}
    names = [event["name"] for event in events if event["ph"] == "i"]
    assert names == ["2 records were lost: the ring was full"]
    processes = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert processes == ["gpuq: all requests", "odd \udcff.bin"]
    good, refused = (e for e in events if e.get("cat") == "request")
    assert good["args"]["tag"] == str(big)
    assert (good["name"], refused["name"]) == ("10 bytes", "10 bytes: BAD_SOURCE")
    assert [(e["name"], ns(e["dur"])) for e in events if e.get("cat") == "phase"][:4] == list(
        zip(phases.PHASES, (10, 50, 10, 30), strict=True)
    )
    depths = [(ns(e["ts"]), e["args"]["requests"]) for e in events if e["ph"] == "C"]
    assert depths == [(0, 2), (100, 0)]


# --- figures -------------------------------------------------------------------------------


def test_the_summarys_figures() -> None:
    later = {"admitted_ns": 1050, "first_read_ns": 1050, "completed_ns": 1250}
    trace = made_of(
        record(0),
        record(1, **later, path=BY_NEIGHBOURS_READ, reads=0),
        record(2, **REFUSED | {"source": 99}),
        lost=3,
    )
    summary = gpuq.trace.summarize(trace)
    assert (summary.requests, summary.lost, summary.bytes, summary.reads) == (3, 3, 20, 1)
    assert summary.seconds == pytest.approx(250e-9)
    assert summary.bytes_per_second == pytest.approx(20 / 250e-9)
    assert summary.depth_mean == pytest.approx((100 + 200 + 100) / 250)
    assert summary.depth_most == 3
    assert (summary.latency_ns[50.0], summary.latency_ns[100.0]) == (150, 200)
    shares = {name: phase.share for name, phase in summary.phases.items()}
    assert shares == pytest.approx(
        dict(zip(phases.PHASES, (10 / 300, 60 / 300, 20 / 300, 210 / 300), strict=True))
    )
    assert {name: group.requests for name, group in summary.by_status.items()} == {
        "OK": 2, "BAD_SOURCE": 1,
    }  # fmt: skip
    assert set(summary.by_path) == {"direct", "neighbour's read", "no read"}
    assert {n: (g.requests, g.bytes) for n, g in summary.by_source.items()} == {
        "a.bin": (2, 20), "handle 0x63": (1, 0),
    }  # fmt: skip
    text = str(summary)
    assert "3 MORE WERE LOST" in text
    assert "OK" in text
    assert "copying" in text
    assert "a.bin" in text


def test_a_file_that_was_opened_twice_is_one() -> None:
    records = np.array([record(0), record(1, source=2 << 32)], TRACE_DTYPE)
    trace = gpuq.Trace(records, {1 << 32: "a", 2 << 32: "a"}, 0, "cpu", "threads")
    (group,) = gpuq.trace.summarize(trace).by_source.items()
    assert (group[0], group[1].requests, group[1].bytes) == ("a", 2, 20)


def test_a_trace_of_nothing_and_one_without_reads_have_summaries() -> None:
    assert str(gpuq.trace.summarize(made_of())) == "0 requests, target cpu, reader threads"
    summary = gpuq.trace.summarize(made_of(record(**REFUSED | {"completed_ns": 1000})))
    assert (summary.latency_ns, summary.phases, summary.bytes_per_second) == ({}, {}, None)
    assert "BAD_SOURCE" in str(summary)


# --- pictures ------------------------------------------------------------------------------


def drawn_texts(figure: Any) -> str:
    texts = [text.get_text() for axes in figure.axes for text in axes.texts]
    titles = [axes.get_title() for axes in figure.axes]
    legends = [
        text.get_text()
        for axes in figure.axes
        if axes.get_legend()
        for text in axes.get_legend().get_texts()
    ]
    return "\n".join([figure.get_suptitle(), *titles, *texts, *legends])


def test_the_plot_draws_each_phase_of_each_request(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    records = [record(n, admitted_ns=1000 - n) for n in range(7)]
    figure = gpuq.trace.plot(made_of(*records, lost=5), tmp_path / "t.png")
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")
    requests, _, rate, depth = figure.axes
    assert len(requests.collections) == len(phases.PHASES)
    assert {len(lines.get_segments()) for lines in requests.collections} == {7}
    first = requests.collections[0].get_segments()[0]
    assert first[:, 0] == pytest.approx([0, 16e-6]), "the request that was admitted first, in ms"
    assert max(depth.lines[0].get_ydata()) == 7
    assert rate.patches[0].get_data().values.max() > 0
    assert "5 more were lost" in drawn_texts(figure)
    assert set(phases.PHASES) | {"direct"} <= set(drawn_texts(figure).splitlines())
    assert figure._repr_png_().startswith(b"\x89PNG")


def test_the_plot_of_many_requests_says_that_it_left_some_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(picture, "_MOST_LINES", 10)
    axes = gpuq.trace.plot(made_of(*(record(n) for n in range(95)))).axes[0]
    assert len(axes.collections[0].get_segments()) == 10
    assert axes.get_ylabel() == "request (each 10th is drawn)"


@pytest.mark.parametrize("records", [[], [record(**REFUSED | {"completed_ns": 1000})]])
def test_a_plot_of_nothing_is_still_one(records: list[Any], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    gpuq.trace.plot(made_of(*records), tmp_path / "t.svg")
    assert b"<svg" in (tmp_path / "t.svg").read_bytes()


def test_an_ending_that_is_no_pictures_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(gpuq.ConfigError, match=r"t\.doc: a plot ends in one of .*\.png"):
        gpuq.trace.plot(made_of(record()), tmp_path / "t.doc")
    assert not list(tmp_path.iterdir())


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(gpuq.ConfigError, match=r"notebook.*pip install 'gpuq\[notebook\]'"):
        gpuq.trace.plot(made_of(record()))


def test_nothing_but_a_plot_imports_matplotlib() -> None:
    code = "import gpuq, gpuq.cli, sys; print('matplotlib' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr
