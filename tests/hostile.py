"""A process whose kernels write what they like into the queue; see `test_hostile`.

The slots of a queue are shared out: `attack` writes most of them, while `hammer` rewrites the
words of some, and a few belong to an honest kernel, whose bytes are all checked. Nobody claims
tickets, since a hostile kernel would not either: each writer knows which ticket a slot of its own
waits for.

Run as a program it prints one line of JSON, and dies where gpuq lets it.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import mmap
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
from kernels import compiled_kernel

import gpuq
from gpuq.kernels.queue import flag_of, judge, publish
from gpuq.layout import (
    COUNTER_WORDS,
    DESTINATION,
    END,
    FLAG_SEQUENCE_SHIFT,
    FLAG_WORDS,
    HEARTBEAT,
    OFFSET,
    OPTIONS,
    REVISION,
    REVISION_SEEN,
    SEQUENCE,
    SOURCE,
    START,
    STATE,
    SUBMISSION_WORDS,
    TAG,
    Status,
)
from gpuq.ordering import as_signed, as_word, load_acquire, relax, store_release

SLOTS = 64
HONEST = 8  # slots 0 to 7
HAMMERED = 24  # the next
COUNTERS = 4

SECRET = 0xD7
"""The bytes of a file that is never registered, and of what lies outside a source's limits."""
GUARD = 0xEE
PUBLIC = 0x7F
"""Every byte that may be read is at most this."""

FILE_BYTES = 300_000
LIMIT_START, LIMIT_END = 8_191, 200_001
ROOM = 24_576  # of a destination
GAP = 8_192
BLOCK = 4_096  # destinations begin with one
DESTINATIONS = 4

_PENDING = int(Status.PENDING)
_OK = int(Status.OK)
# Passes of the poller that a lost submission is left standing for. Turns of the attacker's own loop
# would be time, and then a poller without a core is given nothing that it can judge.
_PATIENCE = 50
_YIELD = 1000

# Columns of what `attack` and the honest kernel count.
WRITTEN, IN_TURN, REWRITTEN, FORBIDDEN = range(4)
ASKED, RIGHT, WRONG_STATUS, WRONG_BYTES = range(4)


def draw_body(state):
    """Return the next random word (xorshift64*); `state` holds the last."""
    x = state[0]
    x ^= x >> np.uint64(12)
    x ^= x << np.uint64(25)
    x ^= x >> np.uint64(27)
    state[0] = x
    return x * np.uint64(0x2545F4914F6CDD1D)


draw = compiled_kernel(draw_body)


def below_body(state, most):
    """Return a random number from 0 to `most` - 1."""
    return np.int64((draw(state) >> np.uint64(33)) % np.uint64(most))


below = compiled_kernel(below_body)


def spite_body(state, edge):
    """Return a word that a careless check may let pass: around `edge`, around 0, 2^63 or 2^64."""
    by = below(state, 5) - 2
    kind = below(state, 7)
    if kind == 0:
        return as_word(by)
    if kind == 1:
        return as_word(1 << 63) + as_word(by)
    if kind == 2:
        return as_word(-below(state, 70_000))
    if kind == 3:
        return draw(state)
    if kind == 4:
        return as_word(1 << below(state, 64)) + as_word(by)
    return as_word(edge + by)


spite = compiled_kernel(spite_body)


def attack_body(q, handles, arena, words, seed, first, last, count, counts):
    """Write `count` submissions into slots `first` to `last`; most of them are bad.

    Two rows of `handles`: sources and destinations, the stale and the forged ones included. At
    the seventh, the one in turn is published only half of the time, and what stands there is
    rewritten after it was published.
    """
    state = np.empty(1, dtype=np.uint64)
    state[0] = seed
    expected = np.arange(q.capacity)
    misses = np.zeros(q.capacity, dtype=np.int64)
    passes = load_acquire(q.control, HEARTBEAT)
    while counts[WRITTEN] < count:
        written = counts[WRITTEN]
        now = load_acquire(q.control, HEARTBEAT)
        passed = as_signed(now - passes)
        passes = now
        if below(state, 64) == 0:
            # A later answer may cover what must not be seen.
            for i in range(len(arena)):
                if arena[i] > PUBLIC and arena[i] != GUARD:
                    counts[FORBIDDEN] += 1
                    arena[i] = GUARD
        for slot in range(first, last):
            ticket = expected[slot]
            before = ticket - q.capacity
            if before >= 0 and flag_of(q, before) >> FLAG_SEQUENCE_SHIFT != before + 1:
                misses[slot] += passed
                if misses[slot] < _PATIENCE:
                    continue
                # Lost, by wrong sequences or by scribbling: it may wait for an earlier lap.
                ticket = max(ticket - q.capacity * below(state, 3), slot)
            misses[slot] = 0
            base = slot * SUBMISSION_WORDS
            is_legal = below(state, 24) == 0
            length = below(state, 200) if below(state, 4) else below(state, ROOM)
            start = LIMIT_START + below(state, LIMIT_END - LIMIT_START - length)
            offset = below(state, ROOM - length + 1)
            source = handles[0, 0]
            destination = handles[1, below(state, DESTINATIONS)]
            if below(state, 4) == 0:
                start = LIMIT_END - length
                offset = ROOM - length
            elif below(state, 2) == 0:
                # Its blocks may be read straight to where they go.
                start += (offset - start) % BLOCK
                length = min(length, LIMIT_END - start)
            words[SOURCE] = as_word(source)
            words[DESTINATION] = as_word(destination)
            words[START] = as_word(start)
            words[END] = as_word(start + length)
            words[OFFSET] = as_word(offset)
            words[OPTIONS] = as_word(below(state, COUNTERS + 1))
            if not is_legal:
                for _ in range(1 + below(state, 2)):
                    what = below(state, 12)
                    if what == 0:
                        words[SOURCE] = as_word(handles[0, below(state, handles.shape[1])])
                    elif what == 1:
                        words[DESTINATION] = as_word(handles[1, below(state, handles.shape[1])])
                    elif what == 2:
                        words[SOURCE] = spite(state, source)
                    elif what == 3:
                        words[DESTINATION] = spite(state, destination)
                    elif what == 4:
                        words[START] = spite(state, LIMIT_START - 1)
                    elif what == 5:
                        words[END] = spite(state, LIMIT_END + 1)
                    elif what == 6:
                        words[OFFSET] = spite(state, ROOM - length + 1)
                    elif what == 7:
                        # Off by one byte.
                        words[OFFSET] = as_word(ROOM - length + 1)
                    elif what == 8:
                        words[OPTIONS] = spite(state, COUNTERS + 1)
                    elif what == 9:
                        # A range that wraps, and one whose length is right.
                        words[START] = as_word(-below(state, 10_000))
                        words[END] = as_word(below(state, 10_000))
                    elif what == 10:
                        # One byte too far, at either end.
                        first_byte = LIMIT_END - length + 1 if below(state, 2) else LIMIT_START - 1
                        words[START] = as_word(first_byte)
                        words[END] = as_word(first_byte + length)
                    else:
                        for word in range(SOURCE, SUBMISSION_WORDS):
                            words[word] = draw(state)
            if slot >= HONEST + HAMMERED or below(state, 8) == 0:
                for word in range(SOURCE, SUBMISSION_WORDS):
                    q.submissions[base + word] = words[word]
            kind = below(state, 16)
            if kind == 0:
                # Repeated, skipped, of another lap, far ahead, of another slot, or anything.
                which = below(state, 6)
                sequence = as_word(ticket + 1 - q.capacity)
                if which == 1:
                    sequence = as_word(ticket + 1 + q.capacity)
                elif which == 2:
                    sequence = as_word(ticket + 1 + q.capacity * below(state, 1 << 30))
                elif which == 3:
                    sequence = as_word(ticket + below(state, 3))
                elif which == 4:
                    sequence = spite(state, ticket + 1)
                elif which == 5:
                    sequence = draw(state)
                store_release(q.submissions, base + SEQUENCE, sequence)
                counts[WRITTEN] += 1
            if kind == 1:
                # Scribble where only the host or other kernels write.
                q.flags[slot * FLAG_WORDS] = spite(state, ticket << FLAG_SEQUENCE_SHIFT)
                q.turns[slot] = draw(state)
                q.tail[0] = draw(state)
                place = below(state, COUNTERS * COUNTER_WORDS)
                q.counters[place] = spite(state, 1 << 24)
                q.taken[place] = draw(state)
            # The poller may have taken a sequence that was meant as a wrong one.
            store_release(q.submissions, base + SEQUENCE, as_word(ticket + 1))
            counts[WRITTEN] += 1
            counts[IN_TURN] += 1
            expected[slot] = ticket + q.capacity
            if below(state, 8) == 0:
                # Rewrite what was published, while it may be under examination or in flight.
                word = SOURCE + below(state, SUBMISSION_WORDS - 1)
                q.submissions[base + word] = spite(state, LIMIT_END)
                counts[REWRITTEN] += 1
        if counts[WRITTEN] == written:
            relax(_YIELD)


def hammer_body(q, handles, first, last, stop, counts):
    """Flip one word of all its slots between legal and illegal, as fast as this machine does."""
    turn = 0
    while load_acquire(stop, 0) == as_word(0):
        word = START + turn % 4
        start = LIMIT_START if word == START else LIMIT_END - 64
        legal = as_word(start)
        illegal = as_word(start - 64)
        if word == END:
            legal = as_word(start + 64)
            illegal = as_word(start + 128)
        elif word == OFFSET:
            legal = as_word(0)
            illegal = as_word(ROOM)
        elif word == TAG:
            # Nothing is illegal there; its turn is for a counter that there is not.
            word = OPTIONS
            legal = as_word(0)
            illegal = as_word(1 << 40)
        for _ in range(64):
            for slot in range(first, last):
                base = slot * SUBMISSION_WORDS
                q.submissions[base + SOURCE] = as_word(handles[0, 0])
                q.submissions[base + DESTINATION] = as_word(handles[1, 0])
                q.submissions[base + START] = as_word(start)
                q.submissions[base + END] = as_word(start + 64)
                q.submissions[base + OFFSET] = as_word(0)
                q.submissions[base + OPTIONS] = as_word(0)
            for _ in range(64):
                for slot in range(first, last):
                    store_release(q.submissions, slot * SUBMISSION_WORDS + word, illegal)
                for slot in range(first, last):
                    store_release(q.submissions, slot * SUBMISSION_WORDS + word, legal)
            counts[0] += 2 * 64 * (last - first)
        turn += 1


def honest_body(q, source, destination, array, data, seed, stop, counts):
    """Ask for random ranges on slots of its own, one at a time, and check every byte."""
    state = np.empty(1, dtype=np.uint64)
    state[0] = seed
    lap = 0
    while load_acquire(stop, 0) == as_word(0):
        for slot in range(HONEST):
            ticket = lap * q.capacity + slot
            length = below(state, 600) if below(state, 8) else below(state, ROOM)
            start = below(state, len(data) - length + 1)
            offset = below(state, ROOM - length + 1)
            if below(state, 2) == 0:
                start -= (start - offset) % BLOCK
                start += 0 if start >= 0 else BLOCK
                length = min(length, len(data) - start)
            array[:] = GUARD
            publish(q, ticket, source, destination, offset, start, start + length, ticket)
            spins = 0
            status = _PENDING
            while status == _PENDING:
                status = judge(flag_of(q, ticket), ticket)
                relax(spins)
                spins += 1
            counts[ASKED] += 1
            if status != _OK:
                counts[WRONG_STATUS] += 1
                continue
            is_right = True
            for i in range(ROOM):
                wanted = np.uint8(GUARD)
                if offset <= i < offset + length:
                    wanted = data[start + i - offset]
                if array[i] != wanted:
                    is_right = False
            counts[RIGHT if is_right else WRONG_BYTES] += 1
        lap += 1


attack = compiled_kernel(attack_body)
hammer = compiled_kernel(hammer_body)
honest = compiled_kernel(honest_body)


class Arena:
    """Destinations with guards around each, in one mapping; whoever goes beyond dies."""

    def __init__(self, count: int) -> None:
        self.bytes = np.frombuffer(mmap.mmap(-1, count * (ROOM + GAP) + GAP), dtype=np.uint8)
        self.bytes[:] = GUARD
        self.rooms = [
            self.bytes[GAP + i * (ROOM + GAP) : GAP + i * (ROOM + GAP) + ROOM] for i in range(count)
        ]

    def changed_guards(self) -> int:
        """Return how many bytes outside the destinations were changed."""
        gaps = self.bytes.copy()
        for i in range(len(self.rooms)):
            gaps[GAP + i * (ROOM + GAP) : GAP + i * (ROOM + GAP) + ROOM] = GUARD
        return int((gaps != GUARD).sum())

    def forbidden_bytes(self) -> int:
        """Return how many bytes are neither public nor as they were."""
        return int(((self.bytes > PUBLIC) & (self.bytes != GUARD)).sum())


def assault(loader: gpuq.Loader, folder: Path, count: int, seed: int) -> dict[str, Any]:
    """Let all kernels loose on a loader; return the counts."""
    public = np.random.default_rng(seed).integers(0, PUBLIC + 1, FILE_BYTES, dtype=np.uint8)
    public.tofile(folder / "public")
    limited = np.full(FILE_BYTES, SECRET, dtype=np.uint8)
    limited[LIMIT_START:LIMIT_END] = public[LIMIT_START:LIMIT_END]
    limited.tofile(folder / "limited")
    np.full(FILE_BYTES, SECRET, dtype=np.uint8).tofile(folder / "secret")
    secret = os.open(folder / "secret", os.O_RDONLY)

    arena = Arena(DESTINATIONS + 1)
    stale_source = loader.open(folder / "public")
    limited_source = loader.open(folder / "limited", start=LIMIT_START, end=LIMIT_END)
    honest_source = loader.open(folder / "public")
    destinations = [loader.register(room) for room in arena.rooms[:DESTINATIONS]]
    # A handle that is guessed right is as good as one that was given: the honest destination
    # stands where the spiteful words do not come.
    for _ in range(10):
        loader.register(np.empty(0, np.uint8))
    honest_destination = loader.register(arena.rooms[-1])
    stale_destination = loader.register(np.zeros(9, np.uint8))
    stale_source.close()
    stale_destination.unregister()
    handles = np.array(
        [
            [limited_source.handle, stale_source.handle, 0, -1, 1 << 62, secret, 5 << 32, 1 << 32],
            [*(d.handle for d in destinations), stale_destination.handle, 0, -1, 9 << 32],
        ],
        dtype=np.int64,
    )
    q = loader.queue
    stop = np.zeros(1, np.uint64)
    counts = [np.zeros(4, np.int64) for _ in range(3)]
    honest_arguments = (
        q, honest_source.handle, honest_destination.handle, arena.rooms[-1], public,
        np.uint64(seed), stop, counts[0],
    )  # fmt: skip
    hammer_arguments = (q, handles, HONEST, HONEST + HAMMERED, stop, counts[1])

    attack_arguments = (
        q, handles, arena.bytes, np.zeros(SUBMISSION_WORDS, np.uint64), np.uint64(seed + 1),
        HONEST, SLOTS, count, counts[2],
    )  # fmt: skip
    loader.prepare(attack, *attack_arguments)
    threads = []
    for kernel, arguments in ((honest, honest_arguments), (hammer, hammer_arguments)):
        loader.prepare(kernel, *arguments)
        threads.append(threading.Thread(target=kernel, args=arguments, daemon=True))
    for thread in threads:
        thread.start()
    attack(*attack_arguments)
    while counts[0][ASKED] < 200:
        relax(_YIELD)
    stop[0] = 1
    for thread in threads:
        thread.join()
    statistics = loader.statistics()
    statuses = statistics.requests
    os.close(secret)
    return {
        "submissions": int(counts[2][WRITTEN]),
        "in_turn": int(counts[2][IN_TURN]),
        "rewritten": int(counts[2][REWRITTEN]),
        "flips": int(counts[1][0]),
        "honest_asked": int(counts[0][ASKED]),
        "honest_right": int(counts[0][RIGHT]),
        "statuses": statuses,
        "merged": statistics.merged,
        "straight": statistics.straight,
        "answered": sum(statuses.values()),
        "guards_changed": arena.changed_guards(),
        "forbidden_bytes": arena.forbidden_bytes() + int(counts[2][FORBIDDEN]),
    }


def scribble_over_control(loader: gpuq.Loader, folder: Path) -> list[str]:
    """Overwrite the words that the host shows to kernels; return what the host fell for."""
    np.arange(100, dtype=np.uint8).tofile(folder / "small")
    source = loader.open(folder / "small")
    fooled = []
    for word in (77, 0, 1 << 63, (1 << 64) - 1, 2, 3, 4):
        for place in (STATE, HEARTBEAT, REVISION, REVISION_SEEN):
            loader.queue.control[place] = word
        ticket = int(loader.queue.submissions[SEQUENCE]) - 1 + SLOTS
        array = np.full(100, GUARD, np.uint8)
        destination = loader.register(array)
        publish(loader.queue, ticket, source.handle, destination.handle, 0, 0, 100, 0)
        answer = _PENDING
        for _ in range(20_000):
            answer = judge(flag_of(loader.queue, ticket), ticket)
            if answer != _PENDING:
                break
            relax(_YIELD)
        if answer != _OK or not (array == np.arange(100)).all():
            fooled.append(f"{word:#x}: {Status(int(answer)).name}")
        if loader.state != gpuq.State.RUNNING:
            fooled.append(f"{word:#x}: {loader.state.name}")
        destination.unregister()
    source.close()
    return fooled


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--reader", default="auto")
    parser.add_argument("--direct", default="auto")
    parser.add_argument("--straight", type=int, default=0, help="the setting straight_bytes")
    parser.add_argument("--submissions", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    faulthandler.enable()
    loader = gpuq.Loader(
        target="cpu", reader=options.reader, slots=SLOTS, staging_buffers=8, staging_bytes=4096,
        counters=COUNTERS, reader_threads=2, direct=options.direct,
        straight_bytes=options.straight,
    )  # fmt: skip
    with loader:
        result = assault(loader, options.folder, options.submissions, options.seed)
        result["fooled"] = scribble_over_control(loader, options.folder)
    result["state"] = loader.state.name
    print(json.dumps(result))


if __name__ == "__main__":
    main()
