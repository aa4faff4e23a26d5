"""The soak itself: loaders, one after another, each with rounds of random requests.

While a round's kernels run, the meddler truncates, grows and replaces files, closes and opens
sources, takes destinations away and gives them back, and ends the loader. Then every byte of the
destinations is checked, and every status, as far as the meddler leaves it certain.
"""

from __future__ import annotations

import collections
import contextlib
import gc
import os
import random
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gpuq.errors import ClosedError, ReaderUnavailableError
from gpuq.handles import Destination, Source
from gpuq.layout import State, Status
from gpuq.loader import Loader
from gpuq.soak.content import (
    ANY_RIGHT,
    AT,
    BEGIN,
    EXACT,
    EXACT_OR_ZERO,
    EXPECTATION_WORDS,
    FILE,
    GUARD,
    LENGTH,
    RULE,
    STABLE,
    UNTOUCHED,
    byte_at,
    find_wrong,
)
from gpuq.soak.files import Folder, SoakFile
from gpuq.soak.kernel import COUNTED, KINDS, REQUEST_WORDS, soak_body
from gpuq.soak.meddler import Meddler

READERS = ("io_uring", "threads")
FILES = 6
LARGEST_FILE = 3 << 20
SOURCES = 8
DESTINATIONS = 2
DESTINATION_BYTES = 2 << 20
MOST_REQUESTS = 600
ROUNDS_OF_A_LOADER = 30
GROUPS = 24
KERNEL_THREADS = 3
_POST_TIMEOUT_NS = 600 * 10**9

_UNTOUCHED_BY = {Status.BAD_SOURCE, Status.BAD_DESTINATION, Status.BAD_RANGE, Status.OUT_OF_BOUNDS}


class WrongError(Exception):
    """A byte or a status is wrong; the message says which, and how to come there again."""


@dataclass
class Soak:
    """What a soak did.

    Attributes
    ----------
    seed : int
    seconds : float
    rounds, requests, bytes_checked : int
    loaders : Counter
        By reader and mode.
    statuses, meddling, reading : Counter
        Answers by name; what was done to files and handles; reads, retries and so on.
    fault : str or None
    """

    seed: int
    seconds: float = 0.0
    rounds: int = 0
    requests: int = 0
    bytes_checked: int = 0
    loaders: collections.Counter[str] = field(default_factory=collections.Counter)
    statuses: collections.Counter[str] = field(default_factory=collections.Counter)
    meddling: collections.Counter[str] = field(default_factory=collections.Counter)
    reading: collections.Counter[str] = field(default_factory=collections.Counter)
    fault: str | None = None


@dataclass
class _OpenSource:
    source: Source
    file: SoakFile
    is_leaving: bool = False


@dataclass
class _Registered:
    destination: Destination
    array: Any
    is_leaving: bool = False


@dataclass(frozen=True)
class _Request:
    """A request, what it uses, and what its words alone make certain."""

    words: tuple[int, int, int, int, int]
    opened: _OpenSource
    registered: _Registered
    changes: int
    certain: Status | None = None

    def allowed(self, was_ended: bool) -> set[Status]:
        """Return the statuses that it may have got by now."""
        others: set[Status] = set()
        if was_ended:
            others.add(Status.ABORTED)
        if self.opened.is_leaving:
            others.add(Status.BAD_SOURCE)
        if self.registered.is_leaving:
            others.add(Status.BAD_DESTINATION)
        return others | self._by_content()

    def _by_content(self) -> set[Status]:
        _, _, _, start, end = self.words
        source, file = self.opened.source, self.opened.file
        if self.certain is not None:
            return {self.certain}
        if start < source.start or end > source.end:
            return {Status.OUT_OF_BOUNDS}
        if start == end or end <= file.stable:
            return {Status.OK}
        if self.is_calm:
            return {Status.OK if end <= file.size else Status.END_OF_FILE}
        return {Status.END_OF_FILE} if end > file.most else {Status.OK, Status.END_OF_FILE}

    @property
    def is_calm(self) -> bool:
        """Whether nothing has changed its file since it was made up."""
        return self.changes % 2 == 0 and self.changes == self.opened.file.changes

    def rule(self, status: Status) -> int:
        """Return by which rule its bytes are judged."""
        if status == Status.OK:
            return EXACT if self.is_calm else EXACT_OR_ZERO
        return UNTOUCHED if status in _UNTOUCHED_BY else ANY_RIGHT


class _Life:
    """A loader with its sources and destinations, from its start to its end."""

    def __init__(self, soak: Soak, folder: Folder, reader: str, seed: int) -> None:
        self.seed = seed
        self.soak = soak
        self.folder = folder
        self.random = random.Random(seed)
        self.is_ended = False
        self.lock = threading.Lock()
        self.stale_sources, self.stale_destinations = [0], [0]
        self.ends: dict[int, int] = {}
        pick = self.random.choice
        settings: dict[str, Any] = {
            "target": "cpu",
            "slots": pick([2, 8, 64, 256]),
            "staging_buffers": pick([1, 2, 5, 32]),
            "staging_bytes": pick([4096, 16384, 131072]),
            "merge_bytes": pick([0, 4096, 65536]),
            "straight_bytes": pick([0, 1, 512, 4096, 65536]),
            "reader_threads": pick([1, 3]),
            "sources": SOURCES + 1,
            "destinations": DESTINATIONS + 1,
            "counters": GROUPS,
            "direct": pick(["auto", "auto", "off"]),
            "post_timeout_ns": _POST_TIMEOUT_NS,
        }
        self.staging_bytes = settings["staging_bytes"]
        try:
            self.loader = Loader(reader=reader, **settings)
        except ReaderUnavailableError:
            self.loader = Loader(reader="threads", **settings)
        self.reader = self.loader.statistics().reader
        for _ in range(GROUPS):
            self.loader.counter()
        self.sources = [self.open() for _ in range(SOURCES)]
        self.destinations = [
            self.register(np.empty(DESTINATION_BYTES, dtype=np.uint8)) for _ in range(DESTINATIONS)
        ]
        direct = sum(self.loader.explain(one.source).direct for one in self.sources)
        soak.loaders[f"{self.reader}, {direct} of {SOURCES} sources direct"] += 1

    def open(self) -> _OpenSource:
        """Open one of the files, sometimes only a part of it."""
        found: list[_OpenSource] = []

        def open_it(file: SoakFile) -> None:
            limits: dict[str, Any] = {}
            if self.random.random() < 0.2:
                start = self.random.randint(0, file.most // 4)
                limits = {"start": start, "end": self.random.randint(start, file.most)}
            found.append(_OpenSource(self.loader.open(file.path, **limits), file))

        self.folder.with_file(self.random.randrange(FILES), open_it)
        return found[0]

    def register(self, array: Any) -> _Registered:
        """Let kernels have bytes put into an array."""
        return _Registered(self.loader.register(array), array)

    # --- making requests up ---

    def make_round(self) -> list[_Request]:
        """Return requests, those of a destination apart from each other there."""
        with self.lock:
            sources, destinations = list(self.sources), list(self.destinations)
        requests: list[_Request] = []
        for registered in destinations:
            registered.array[:] = GUARD
            room = self.random.choice([60_000, DESTINATION_BYTES, DESTINATION_BYTES])
            position = self.random.randint(0, 100)
            for _ in range(MOST_REQUESTS // DESTINATIONS):
                length = self._length()
                if position + length > room:
                    break
                opened = self.random.choice(sources)
                requests.append(self._request(opened, registered, position, length))
                position += length + self.random.choice([0, 0, 1, 7, 64])
        self.random.shuffle(requests)
        return requests

    def _length(self) -> int:
        most = self.random.choice([0, 1, 64, 600, 5000, 20_000, 9 * self.staging_bytes])
        return self.random.randint(0, min(most, DESTINATION_BYTES // 3))

    def _request(
        self, opened: _OpenSource, registered: _Registered, position: int, length: int
    ) -> _Request:
        file = opened.file
        changes = file.changes
        edge = self.random.choice([0, 512, 4096, self.staging_bytes, file.stable, file.most])
        near = max(edge + self.random.randint(-3, 3) - self.random.choice([0, length]), 0)
        # Behind the last one of this file: neighbours, unless shuffled too far apart.
        starts = [self.random.randint(0, file.most), near, self.ends.get(file.number, 0)]
        start = self.random.choice(starts)
        if self.random.randrange(3) == 0:
            # In the place of a block in which it goes to memory, so that blocks may go straight.
            start += (registered.array.ctypes.data + position - start) % 4096
        self.ends[file.number] = start + length
        source, destination = opened.source.handle, registered.destination.handle
        words = (source, destination, position, start, start + length)
        certain = None
        fault = self.random.randrange(80) if length > 0 else 99
        if fault == 0:
            words = (self.random.choice(self.stale_sources), *words[1:])
            certain = Status.BAD_SOURCE
        elif fault == 1:
            words = (source, self.random.choice(self.stale_destinations), *words[2:])
            certain = Status.BAD_DESTINATION
        elif fault == 2:
            words = (source, destination, position, start + length, start)
            certain = Status.BAD_RANGE
        elif fault == 3:
            beyond = DESTINATION_BYTES - length + 1
            offset = self.random.choice([beyond, beyond + (1 << 40), (1 << 63) - 1])
            words = (source, destination, offset, start, start + length)
            certain = Status.OUT_OF_BOUNDS
        return _Request(words, opened, registered, changes, certain)

    # --- running and checking them ---

    def run_round(self) -> None:
        """Launch kernels with random requests, and check what they got.

        Raises
        ------
        WrongError
        """
        requests = self.make_round()
        count = len(requests)
        cuts = sorted(self.random.randint(0, count) for _ in range(GROUPS - 1))
        firsts = np.array([0, *cuts, count], dtype=np.int64)
        kinds = np.array([self.random.randrange(KINDS) for _ in range(GROUPS)], dtype=np.int64)
        words = np.array([request.words for request in requests], dtype=np.int64)
        statuses, outcomes = np.zeros(count, np.int64), np.zeros(GROUPS, np.int64)
        self.loader.launch(
            soak_body, GROUPS, self.loader.queue, words.reshape(-1, REQUEST_WORDS), firsts, kinds,
            np.zeros(count, np.int64), statuses, outcomes, threads=KERNEL_THREADS,
        )  # fmt: skip
        self.loader.synchronize()
        if self.is_ended:
            # Until it is closed, a read that was under way may still bring bytes.
            self.loader.close()
        got = self._check_statuses(requests, firsts, kinds, statuses, outcomes)
        self._check_bytes(requests, got)
        self.soak.rounds += 1
        self.soak.requests += count

    def _check_statuses(
        self, requests: list[_Request], firsts: Any, kinds: Any, statuses: Any, outcomes: Any
    ) -> list[Status]:
        """Return the status of each request, or of its group where only that is known."""
        got = [Status(int(status)) for status in statuses]
        for group in range(GROUPS):
            members = range(firsts[group], firsts[group + 1])
            possible: set[Status] = set()
            for n in members:
                allowed = requests[n].allowed(self.is_ended)
                possible |= allowed
                said = Status(int(outcomes[group])) if kinds[group] == COUNTED else got[n]
                if said == Status.OK and got[n] == Status.OK and Status.OK not in allowed:
                    self._fail(requests[n], f"is OK, expected {_names(allowed)}")
                if kinds[group] != COUNTED and said not in allowed:
                    self._fail(requests[n], f"is {said.name}, expected {_names(allowed)}")
            if kinds[group] == COUNTED and outcomes[group] != Status.OK:
                outcome = Status(int(outcomes[group]))
                if outcome not in possible:
                    names = _names(possible)
                    self._fail(None, f"a counter says {outcome.name}, expected {names}")
                for n in members:
                    # Any of them may be the one that failed.
                    got[n] = Status.ABORTED
                    certain = requests[n].certain
                    if certain is not None:
                        got[n] = certain
        return got

    def _check_bytes(self, requests: list[_Request], got: list[Status]) -> None:
        for registered in {id(r.registered): r.registered for r in requests}.values():
            rows = []
            for request, status in zip(requests, got, strict=True):
                _, _, offset, start, end = request.words
                if request.registered is registered and request.certain is None:
                    file = request.opened.file
                    row = [0] * EXPECTATION_WORDS
                    row[AT], row[LENGTH], row[BEGIN] = offset, end - start, start
                    row[FILE], row[STABLE] = file.number, file.stable
                    row[RULE] = request.rule(status)
                    rows.append((row, request))
            rows.sort(key=lambda pair: (pair[0][AT], pair[0][LENGTH]))
            table = np.array([row for row, _ in rows], np.int64).reshape(-1, EXPECTATION_WORDS)
            position, n = find_wrong(registered.array, table)
            if position >= 0:
                found = int(registered.array[position])
                if n < 0:
                    self._fail(None, f"byte {position} of a destination is {found}, not asked for")
                row, request = rows[n]
                place = row[BEGIN] + position - row[AT]
                wanted = int(byte_at(row[FILE], place))
                self._fail(
                    request, f"holds {found} for byte {place} of the file, expected {wanted}"
                )
            self.soak.bytes_checked += len(registered.array)

    def _fail(self, request: _Request | None, what: str) -> None:
        where = f"seed {self.soak.seed}, loader {sum(self.soak.loaders.values())}"
        where += f" (its seed {self.seed}, {self.loader!r}), round {self.soak.rounds}"
        if request is not None:
            file = request.opened.file
            what = f"{file.path} (number {file.number}): request {request.words} {what}"
        raise WrongError(f"{what}; {where}")

    # --- the end ---

    def end(self, how: str) -> None:
        """Close or abort the loader."""
        self.is_ended = True
        getattr(self.loader, how)()

    def add_up(self) -> None:
        """Close what is left and add its statistics to the soak's.

        Raises
        ------
        WrongError
            A closed loader has left requests unanswered.
        """
        self.end("close")
        figures = self.loader.statistics()
        if self.loader.state == State.CLOSED and figures.outstanding:
            self._fail(None, f"{figures.outstanding} requests were never answered")
        self.soak.statuses.update(figures.requests)
        for name in ("bytes", "merged", "straight", "reads", "short_reads", "retries", "fallbacks"):
            self.soak.reading[name] += getattr(figures, name)


def _names(statuses: set[Status]) -> str:
    return " or ".join(sorted(status.name for status in statuses)) or "none"


def run_soak(seconds: float, seed: int, place: str) -> Soak:
    """Soak for about so many seconds, in a folder whose files are the soak's.

    Parameters
    ----------
    seconds : float
        A round that has begun is finished; at least one loader of each reader is run.
    seed : int
        Of every random choice. Threads take turns as they like, so a second run with the same
        seed makes the same choices up to where what a thread did first matters.
    place : str
        Folder for about 15 MiB of files.
    """
    soak = Soak(seed)
    choices = random.Random(seed)
    began = time.monotonic()
    folder = Folder(place, FILES, LARGEST_FILE, random.Random(seed + 1))
    before: tuple[int, int] | None = None
    try:
        while sum(soak.loaders.values()) < len(READERS) or time.monotonic() - began < seconds:
            reader = READERS[sum(soak.loaders.values()) % len(READERS)]
            _live(soak, folder, reader, choices.getrandbits(63), began + seconds)
            gc.collect()
            after = len(os.listdir("/proc/self/fd")), threading.active_count()
            before = before or after
            if after[0] > before[0] or after[1] > before[1]:
                names = "descriptors and threads"
                raise WrongError(f"{names}: {before} after one loader, {after} now; seed {seed}")
    except WrongError as error:
        soak.fault = str(error)
    finally:
        folder.close()
        soak.seconds = time.monotonic() - began
    return soak


def _live(soak: Soak, folder: Folder, reader: str, seed: int, deadline: float) -> None:
    """Run one loader through its rounds."""
    life = _Life(soak, folder, reader, seed)
    try:
        # One round while nothing changes: every status and byte is certain.
        life.run_round()
        meddler = Meddler(life, seed + 1)
        try:
            for _ in range(ROUNDS_OF_A_LOADER):
                if life.is_ended or time.monotonic() > deadline:
                    break
                with contextlib.suppress(ClosedError):
                    life.run_round()
        finally:
            meddler.stop()
        life.add_up()
    finally:
        life.end("abort")
        life.loader.close()
