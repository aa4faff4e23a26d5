"""A reader that answers from a script, so that a test decides order, lengths and failures.

It keeps the contract of `gpuq.host.reader` and takes its bytes from an array instead of a file.
Whatever it may choose it chooses late: bytes are put into the buffer when the answer is taken,
so that a buffer which was given away too early shows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from gpuq.compiling import implements
from gpuq.host.libc import copy_memory, sleep_ns
from gpuq.host.reader import await_read, flush_reads, reap_read, submit_read
from gpuq.ordering import load_acquire, store_release

# What a read answers.
READ = 0  # at most `value` bytes, all that were asked for where `value` is negative
FAIL = 1  # -value
RAISE = 2  # raises in `reap_read`, like a bug in a reader would

# In which order reads are answered.
OLDEST_FIRST = 0
NEWEST_FIRST = 1
BY_LIST = 2  # as `order` says, by number of submission

# Words. The test writes the first group, at any time; the reader writes the second.
GATE = 0  # 1: nothing is answered
ORDER = 1
LISTED = 2  # entries of `order` that may be answered
FLUSH_ERRNO = 3  # what `flush_reads` returns where it has reads to hand over, 0 for none
SUBMITTED = 8
FLUSHED = 9  # of these, handed over; others are never answered
WAITING = 10  # entries of `waiting`
ANSWERED = 11
WORDS = 16

# Columns of the log.
LEASE = 0
DESCRIPTOR = 1
OFFSET = 2
ADDRESS = 3
NBYTES = 4
RESULT = 5
RANK = 6  # 1 for what was answered first; 0: not answered
LOG_WORDS = 8

_PAUSE_NS = 20_000


class ScriptedReader(NamedTuple):
    """The script, what is waiting for an answer, and a log.

    Attributes
    ----------
    words : array of int64, shape (WORDS,)
    script : array of int64, shape (rows, 2)
        ``(what, value)`` for each read in the order of submission; the last row repeats.
    order : array of int64
        For BY_LIST.
    waiting : array of int64, shape (reads,)
        Numbers of the reads not answered yet, oldest first.
    log : array of int64, shape (entries, LOG_WORDS)
        Of read n at ``n % entries``.
    data : array of uint8
        The bytes of every file, but of those in `files`.
    files : array of int64, shape (files, 3)
        ``(descriptor, first byte in data, bytes)``; a test may change how many bytes one has.
    """

    words: Any
    script: Any
    order: Any
    waiting: Any
    log: Any
    data: Any
    files: Any


def make_scripted_reader(
    data: Any,
    script: Any = ((READ, -1),),
    *,
    reads: int = 64,
    log: int = 4096,
    files: Any = (),
) -> ScriptedReader:
    """Build a reader over `data` that answers by `script`, oldest first, its gate open."""
    return ScriptedReader(
        words=np.zeros(WORDS, dtype=np.int64),
        script=np.array(script, dtype=np.int64).reshape(-1, 2),
        order=np.zeros(log, dtype=np.int64),
        waiting=np.zeros(reads, dtype=np.int64),
        log=np.zeros((log, LOG_WORDS), dtype=np.int64),
        data=np.ascontiguousarray(data, dtype=np.uint8),
        files=np.array(files, dtype=np.int64).reshape(-1, 3),
    )


@implements(submit_read, ScriptedReader)
def _submit(
    reader: Any, lease: Any, descriptor: Any, offset: Any, address: Any, nbytes: Any
) -> None:
    words = reader.words
    number = words[SUBMITTED]
    entry = reader.log[number % len(reader.log)]
    entry[LEASE] = lease
    entry[DESCRIPTOR] = descriptor
    entry[OFFSET] = offset
    entry[ADDRESS] = address
    entry[NBYTES] = nbytes
    entry[RESULT] = 0
    entry[RANK] = 0
    reader.waiting[words[WAITING]] = number
    words[WAITING] += 1
    # A test in another thread waits for this count and then looks at the log.
    store_release(words, SUBMITTED, number + 1)


@implements(flush_reads, ScriptedReader)
def _flush(reader: Any) -> Any:
    if reader.words[FLUSHED] == reader.words[SUBMITTED]:
        return 0
    failure = load_acquire(reader.words, FLUSH_ERRNO)
    if failure == 0:
        store_release(reader.words, FLUSHED, reader.words[SUBMITTED])
    return failure


@implements(reap_read, ScriptedReader)
def _reap(reader: Any) -> Any:
    words = reader.words
    if load_acquire(words, GATE) != 0:
        return -1, 0
    position = -1
    number = -1
    order = load_acquire(words, ORDER)
    if order == BY_LIST and words[ANSWERED] < load_acquire(words, LISTED):
        number = reader.order[words[ANSWERED]]
    for i in range(words[WAITING]):
        if reader.waiting[i] >= words[FLUSHED]:
            continue
        if (
            (order == OLDEST_FIRST and position < 0)
            or order == NEWEST_FIRST
            or (order == BY_LIST and reader.waiting[i] == number)
        ):
            position = i
    if position < 0:
        return -1, 0
    number = reader.waiting[position]
    for i in range(position, words[WAITING] - 1):
        reader.waiting[i] = reader.waiting[i + 1]
    words[WAITING] -= 1

    entry = reader.log[number % len(reader.log)]
    row = reader.script[min(number, len(reader.script) - 1)]
    if row[0] == RAISE:
        raise RuntimeError("the script says so")
    if row[0] == FAIL:
        result = -row[1]
    else:
        first, size = 0, len(reader.data)
        for file in reader.files:
            if file[0] == entry[DESCRIPTOR]:
                first, size = file[1], file[2]
        result = max(min(entry[NBYTES], size - entry[OFFSET]), 0)
        if row[1] >= 0:
            result = min(result, row[1])
        copy_memory(entry[ADDRESS], reader.data.ctypes.data + first + entry[OFFSET], result)
    entry[RESULT] = result
    entry[RANK] = words[ANSWERED] + 1
    store_release(words, ANSWERED, words[ANSWERED] + 1)
    return entry[LEASE], result


@implements(await_read, ScriptedReader)
def _await(reader: Any, timeout_ns: Any) -> None:
    sleep_ns(min(timeout_ns, _PAUSE_NS))
