"""``gpuq bench queue``: what a request costs when nothing is read, beside bare crossings.

Each contestant is two threads, pinned to the same two cores. An *empty* request (``start == end``)
is answered at admission. A *silent* one of eight bytes goes the whole way (issue, reap, copy)
through a reader that reads nothing.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import numpy as np
from numba import typeof

from gpuq.bench.crossings import (
    STOP,
    WORDS,
    cross_queue,
    cross_rings,
    make_ring,
    ping,
    pong,
    send_back,
)
from gpuq.bench.measuring import (
    Contestant,
    Meter,
    Sample,
    Spread,
    console,
    interleave,
    ratios,
    table,
)
from gpuq.bench.reading import BadStatusError
from gpuq.bench.silent_reader import make_silent_reader
from gpuq.config import LoaderConfig
from gpuq.host import poller as serving
from gpuq.host import records
from gpuq.host.device import CpuDevice
from gpuq.host.staging import make_staging
from gpuq.host.tables import (
    ADDRESS,
    ALIGNMENT,
    BUFFERED_DESCRIPTOR,
    DESTINATION_WORDS,
    DIRECT_DESCRIPTOR,
    LIMIT_END,
    MAX_OFFSET,
    NBYTES,
    SOURCE_WORDS,
    CapabilityTable,
)
from gpuq.layout import (
    CONTROL_WORDS,
    COUNTER_WORDS,
    FLAG_WORDS,
    LINE_WORDS,
    STATE,
    SUBMISSION_WORDS,
    TAIL_WORDS,
    Queue,
    State,
    Status,
)
from gpuq.ordering import store_release

DEPTHS = (1, 512)
PING_PONG = "ping-pong"
RING = "ring, there and back"
EMPTY = "queue, empty request"
SILENT = "queue, silent reader"
_NBYTES = {EMPTY: 0, SILENT: 8}
_JOIN_SECONDS = 30.0


def two_cores() -> tuple[int, int]:
    """Return the two cores that the threads are pinned to.

    Raises
    ------
    ValueError
        This process may use one only; two threads that spin on one core measure the scheduler.
    """
    allowed = sorted(os.sched_getaffinity(0))
    if len(allowed) < 2:
        raise ValueError("this needs two cores, and the process may use one only")
    return allowed[0], allowed[1]


class _Pinned:
    """A function in a thread of its own on one core."""

    def __init__(self, core: int, function: Callable[[], Any]) -> None:
        self._outcome: list[Any] = []
        self._error: list[BaseException] = []

        def run() -> None:
            try:
                os.sched_setaffinity(0, {core})  # 0: the calling thread
                self._outcome.append(function())
            except BaseException as error:
                self._error.append(error)

        self._thread = threading.Thread(target=run, name=f"gpuq-bench-{core}", daemon=True)
        self._thread.start()

    def result(self, seconds: float = 0.0) -> Any:
        """Wait for its end, about due in `seconds`; return what the function did or raise."""
        self._thread.join(seconds + _JOIN_SECONDS)
        if self._error:
            raise self._error[0]
        if not self._outcome:
            raise RuntimeError(f"a thread did not end within {seconds + _JOIN_SECONDS:.0f} s")
        return self._outcome[0]


@contextmanager
def _partner(function: Callable[..., Any], *arguments: Any, core: int) -> Iterator[Any]:
    """Yield the words whose STOP ends a partner that runs meanwhile."""
    words = np.zeros(WORDS, dtype=np.uint64)
    thread = _Pinned(core, lambda: function(*arguments, words))
    try:
        yield words
    finally:
        store_release(words, STOP, np.uint64(1))
        thread.result()


@contextmanager
def bare_queue(core: int, trace: int = 0) -> Iterator[tuple[Queue, int, int]]:
    """Yield what `unserved_queue` yields, without the poller, which serves on a core."""
    with unserved_queue(trace) as (q, source, destination, poller):
        serving.serve.compile((typeof(poller),))
        thread = _Pinned(core, lambda: serving.serve(poller))
        try:
            yield q, source, destination
        finally:
            records.raise_state(poller.control, int(State.CLOSING))
            thread.result()


@contextmanager
def unserved_queue(trace: int = 0) -> Iterator[tuple[Queue, int, int, records.Poller]]:
    """Yield a running queue of a loader's default size, and a poller with a silent reader.

    `trace` records are kept of its requests.

    Yields
    ------
    (Queue, int, int, Poller)
        The integers are the handles of a source and of a destination of one line.
    """
    config, device = LoaderConfig(), CpuDevice()
    control, _ = device.mapped_words(CONTROL_WORDS)
    q = Queue(
        submissions=device.mapped_words(config.slots * SUBMISSION_WORDS)[0],
        flags=device.mapped_words(config.slots * FLAG_WORDS)[0],
        control=control,
        tail=device.own_words(TAIL_WORDS, 0, 0),
        turns=device.own_words(config.slots, 0, 1),
        counters=device.mapped_words(COUNTER_WORDS)[0],
        taken=device.own_words(LINE_WORDS, 0, 0),
        capacity=config.slots,
        post_timeout_ns=config.post_timeout_ns,
    )
    sources = CapabilityTable(1, SOURCE_WORDS, "source")
    destinations = CapabilityTable(1, DESTINATION_WORDS, "destination")
    # No read reaches the operating system, and a request of one piece asks for no size.
    source = sources.publish(
        sources.reserve(),
        {DIRECT_DESCRIPTOR: -1, BUFFERED_DESCRIPTOR: -1, ALIGNMENT: 1, LIMIT_END: MAX_OFFSET},
    )
    room = np.zeros(LINE_WORDS, dtype=np.uint64)
    destination = destinations.publish(
        destinations.reserve(), {ADDRESS: room.ctypes.data, NBYTES: room.nbytes}
    )
    memory = device.staging(config.staging_buffers * config.staging_bytes)
    poller = records.make_poller(
        submissions=q.submissions,
        flags=q.flags,
        counters=q.counters,
        control=control,
        sources=sources.words,
        destinations=destinations.words,
        capacity=config.slots,
        staging=make_staging(config.staging_buffers, config.staging_bytes, memory.address),
        reader=make_silent_reader(config.staging_buffers),
        copier=device.copier(config.staging_buffers),
        trace=trace,
    )
    # Else its pages come in while requests are counted.
    poller.trace.fill(0)
    store_release(control, STATE, np.uint64(int(State.RUNNING)))
    try:
        yield q, source, destination, poller
    finally:
        # What the poller wrote to must outlive it.
        del room, memory


def _sample(core: int, function: Callable[[], tuple[int, int]], duration_ns: int) -> Sample:
    with Meter() as meter:
        done, nanoseconds = _Pinned(core, function).result(duration_ns / 1e9)
    return Sample(done, nanoseconds / 1e9, meter.cpu_seconds, meter.others_cores)


def _sample_ping_pong(cores: tuple[int, int], duration_ns: int) -> Sample:
    # The words that stop `pong` are those that it echoes in.
    with _partner(pong, core=cores[1]) as words:
        return _sample(cores[0], lambda: ping(words, duration_ns), duration_ns)


def _sample_ring(cores: tuple[int, int], depth: int, duration_ns: int) -> Sample:
    there, back = (make_ring(LoaderConfig().slots) for _ in range(2))

    def run() -> tuple[int, int]:
        done, nanoseconds, in_order = cross_rings(there, back, depth, duration_ns)
        if not in_order:
            raise RuntimeError("the ring lost, changed or reordered an entry")
        return done, nanoseconds

    with _partner(send_back, there, back, core=cores[1]):
        return _sample(cores[0], run, duration_ns)


def sample_bare_queue(
    cores: tuple[int, int], nbytes: int, depth: int, duration_ns: int, trace: int = 0
) -> Sample:
    """Post to a bare queue from one core, served on the other.

    Raises
    ------
    BadStatusError
    """
    tickets = np.zeros(depth, dtype=np.int64)
    with bare_queue(cores[1], trace) as (q, source, destination):

        def run() -> tuple[int, int]:
            done, nanoseconds, bad = cross_queue(
                q, source, destination, nbytes, depth, duration_ns, tickets
            )
            if bad:
                raise BadStatusError(f"a request ended with {Status(bad).name}")
            return done, nanoseconds

        return _sample(cores[0], run, duration_ns)


def _contestants(cores: tuple[int, int], duration_ns: int) -> dict[str, Contestant]:
    made: dict[str, Contestant] = {
        _name(PING_PONG, 1): lambda number: _sample_ping_pong(cores, duration_ns)
    }
    for depth in DEPTHS:
        made[_name(RING, depth)] = _ring(cores, depth, duration_ns)
        for name, nbytes in _NBYTES.items():
            made[_name(name, depth)] = _queue(cores, nbytes, depth, duration_ns)
    return made


def _ring(cores: tuple[int, int], depth: int, duration_ns: int) -> Contestant:
    return lambda number: _sample_ring(cores, depth, duration_ns)


def _queue(cores: tuple[int, int], nbytes: int, depth: int, duration_ns: int) -> Contestant:
    return lambda number: sample_bare_queue(cores, nbytes, depth, duration_ns)


def _name(contestant: str, depth: int) -> str:
    return f"{contestant}, depth {depth}"


def measure(*, seconds: float = 0.5, rounds: int = 7) -> dict[str, Any]:
    """Measure all; return nanoseconds for each request, and the ratios that matter.

    Parameters
    ----------
    seconds : float
        Of one sample.
    rounds : int
        Samples of each contestant.

    Raises
    ------
    ValueError
        There are no two cores.
    """
    cores = two_cores()
    contestants = _contestants(cores, int(seconds * 1e9))
    for run in _contestants(cores, 1_000_000).values():
        run(0)  # compiles
    samples = interleave(contestants, rounds)
    each = {name: [1e9 / s.rate for s in group] for name, group in samples.items()}
    floor = each[_name(PING_PONG, 1)]
    results = []
    for name, values in each.items():
        depth = int(name.rpartition(" ")[2])
        peer = floor if depth == 1 else each[_name(RING, depth)]
        # At depth 1 times are compared, in bulk rates: the more the better there.
        ratio = ratios(values, peer) if depth == 1 else ratios(peer, values)
        results.append(
            {
                "name": name,
                "depth": depth,
                "ns_per_request": Spread.of(values),
                "beside": PING_PONG if depth == 1 else RING,
                "ratio": ratio,
                "samples": [asdict(sample) for sample in samples[name]],
            }
        )
    others = [sample.others_cores for group in samples.values() for sample in group]
    return {"cores": cores, "results": results, "others_cores": Spread.of(others)}


def show(result: dict[str, Any]) -> None:
    """Print the two tables."""
    for depth in DEPTHS:
        chosen = [one for one in result["results"] if one["depth"] == depth]
        what = "time / ping-pong's" if depth == 1 else "rate / the ring's"
        rows = [
            (
                one["name"].rpartition(",")[0],
                one["ns_per_request"].show(),
                f"{1e3 / one['ns_per_request'].median:.2f}",
                one["ratio"].show(".2f"),
            )
            for one in chosen
        ]
        table(
            f"Two threads on cores {result['cores'][0]} and {result['cores'][1]}, depth {depth}",
            ("", "ns per request (min–max)", "million/s", what),
            rows,
        )
    console.print(
        f"Other processes kept {result['others_cores'].show('.1f')} cores busy meanwhile."
    )
