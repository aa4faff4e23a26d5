"""A CUDA driver on host memory that writes everything down and is as late as CUDA may be.

`RecordingDriver` stands in for the three functions that `gpuq.host.copier` calls in libcuda. The
real compiled copier calls them by address, as it would call the driver's.

What CUDA allows, it does: a copy reads its source when it is executed, not when it is asked for,
and it is executed at the last moment that the driver's answers permit, which is when an event
behind it is first said to be complete. So a staging buffer that was used again too early brings
other bytes, and the copy is marked as CHANGED. What a test wants to fail fails with the CUresult
that it names, at the call that it names.

The functions find their state through the handles that they are given: a stream's or an event's
handle is the address of its record here, and the record holds the address of the driver's words.
One thread at a time may call a driver, as one poller does. A test in another thread may read the
log, which only ever grows, up to `calls`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import cfunc, njit, types
from numba.extending import intrinsic, register_jitable
from numba.np.arrayobj import populate_array

from gpuq.host.copier import DEVICE_MEMORY, CudaCopier, make_cuda_copier
from gpuq.host.device import CpuDevice, Region
from gpuq.host.driver import (
    EVENT_QUERY,
    EVENT_RECORD,
    INVALID_VALUE,
    MEMCPY_HTOD_ASYNC,
    NOT_READY,
    SUCCESS,
    DriverTable,
)
from gpuq.host.libc import copy_memory
from gpuq.layout import FLAG_SEQUENCE_SHIFT
from gpuq.ordering import load_acquire, store_release

# Results that a driver gives when its context is lost.
ILLEGAL_ADDRESS = 700
LAUNCH_FAILED = 719

ALL = 1 << 62
"""An `allow` that holds nothing back."""

# The driver's words. The test writes the first group, at any time.
ALLOWED = 0  # copies, in the order in which they were asked for, that may be executed
MOST_QUERIES = 1  # times that an event says NOT_READY before it may be complete
IS_UNORDERED = 2  # 1: each copy as if on a stream of its own, allowed one by one
FAIL_AT = 3  # three words: which call of each kind fails, counted from 1; 0 for none
FAIL_WITH = 6  # three words: the CUresult
IS_STICKY = 9  # 1: after the first failure every call of any kind fails so, as in a lost context
# The driver writes the second.
CALLS = 10
KIND_CALLS = 11  # three words
LOST_WITH = 14  # the CUresult that stays
COPIES = 15
LOG_ADDRESS = 16
COPIES_ADDRESS = 17
WATCHES_ADDRESS = 18
WATCHES = 19
ROOM = 20  # entries of the log, and of the copies
WORDS = 24

# Columns of a copy.
TO = 0
FROM = 1
NBYTES = 2
STREAM = 3  # address of its record
NEXT_ON_STREAM = 4  # number of the copy behind it, -1 for none
IS_EXECUTED = 5
DIGEST = 6  # of the source, when the copy was asked for
CHANGED = 7  # 1: the source was not the same when it was read
IS_ALLOWED = 8  # the test's, where IS_UNORDERED
COPY_WORDS = 12

# Columns of a stream's and of an event's record.
DRIVER = 0  # address of the driver's words
NUMBER = 1
FIRST_PENDING = 2  # stream: oldest copy that was not executed, -1 for none
LAST = 3  # stream: newest copy, -1 for none
WAITS_FOR = 2  # event: newest copy before it on its stream, -1 for none
ON_STREAM = 3  # event: that stream's record; 0 while it was never recorded
QUERIES = 4  # event: since it was recorded
RECORD_WORDS = 8

# Columns of the log. The kinds are the positions in the table of `gpuq.host.driver`.
KIND = 0
RESULT = 1
COPY = 2  # its number; for an event the newest copy before it, -1 for none
EVENT = 3  # its number, -1 for a copy
STREAM_NUMBER = 4
DESTINATION = 5
SOURCE = 6
COPY_BYTES = 7
IS_COMPLETED = 8  # 1: the request that watches these bytes was completed before this call
WATCH = 9  # which one watches, -1 for none
LOG_WORDS = 12

# Columns of a watch: a completion flag, and the bytes that must be there when it is set.
WATCH_BEGIN = 0
WATCH_END = 1
WATCH_FLAG = 2  # address
WATCH_SEQUENCE = 3
WATCH_WORDS = 4

_FIRST_DIGEST = 1469598103934665603
_DIGEST_PRIME = 1099511628211


def _view_at(element: Any) -> Any:
    """Return an intrinsic that makes an array of `count` elements of the memory at an address."""

    @intrinsic
    def view(typing_context: Any, address: Any, count: Any) -> Any:
        array_type = types.Array(element, 1, "C")

        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            pointer = context.get_data_type(element).as_pointer()
            size = context.get_constant(types.intp, element.bitwidth // 8)
            array = context.make_array(array_type)(context, builder)
            populate_array(
                array,
                data=builder.inttoptr(arguments[0], pointer),
                shape=[arguments[1]],
                strides=[size],
                itemsize=size,
                meminfo=None,
            )
            return array._getvalue()

        return array_type(types.int64, types.intp), codegen

    return view


_words_at = _view_at(types.int64)
_bytes_at = _view_at(types.uint8)


@register_jitable
def _digest(address: Any, nbytes: Any) -> Any:
    value = np.int64(_FIRST_DIGEST)
    for byte in _bytes_at(address, nbytes):
        value = (value ^ np.int64(byte)) * np.int64(_DIGEST_PRIME)
    return value


@register_jitable
def _copy_words(words: Any, number: Any) -> Any:
    return _words_at(words[COPIES_ADDRESS] + number * COPY_WORDS * 8, COPY_WORDS)


@register_jitable
def _begin(words: Any, kind: Any) -> Any:
    """Count a call and return SUCCESS, or what it fails with."""
    words[KIND_CALLS + kind] += 1
    if words[LOST_WITH] != SUCCESS:
        return words[LOST_WITH]
    if words[KIND_CALLS + kind] == load_acquire(words, FAIL_AT + kind):
        result = words[FAIL_WITH + kind]
        if words[IS_STICKY] == 1:
            words[LOST_WITH] = result
        return result
    return SUCCESS


@register_jitable
def _find_watch(words: Any, copy: Any) -> Any:
    """Return (watch, whether its request is completed) of the bytes that a copy writes."""
    if copy < 0:
        return -1, 0
    begin = _copy_words(words, copy)[TO]
    # The newest first: a destination may be asked for again.
    for number in range(load_acquire(words, WATCHES) - 1, -1, -1):
        watch = _words_at(words[WATCHES_ADDRESS] + number * WATCH_WORDS * 8, WATCH_WORDS)
        if watch[WATCH_BEGIN] <= begin < watch[WATCH_END]:
            flag = _words_at(watch[WATCH_FLAG], 1)
            is_completed = load_acquire(flag, 0) >> FLAG_SEQUENCE_SHIFT >= watch[WATCH_SEQUENCE]
            return number, int(is_completed)
    return -1, 0


@register_jitable
def _log(words: Any, kind: Any, result: Any, copy: Any, event: Any, stream: Any) -> None:
    number = words[CALLS]
    if number < words[ROOM]:
        entry = _words_at(words[LOG_ADDRESS] + number * LOG_WORDS * 8, LOG_WORDS)
        entry[KIND] = kind
        entry[RESULT] = result
        entry[COPY] = copy
        entry[EVENT] = event
        entry[STREAM_NUMBER] = stream
        if copy >= 0:
            record = _copy_words(words, copy)
            entry[DESTINATION] = record[TO]
            entry[SOURCE] = record[FROM]
            entry[COPY_BYTES] = record[NBYTES]
        entry[WATCH], entry[IS_COMPLETED] = _find_watch(words, copy)
    # A test in another thread reads this count and then the log.
    store_release(words, CALLS, number + 1)


@register_jitable
def _execute(words: Any, number: Any) -> None:
    copy = _copy_words(words, number)
    if copy[IS_EXECUTED] == 1:
        return
    copy[CHANGED] = int(_digest(copy[FROM], copy[NBYTES]) != copy[DIGEST])
    copy_memory(copy[TO], copy[FROM], copy[NBYTES])
    copy[IS_EXECUTED] = 1


@register_jitable
def _execute_up_to(words: Any, stream: Any, number: Any) -> None:
    """Execute a stream's copies in their order, up to one of them."""
    while stream[FIRST_PENDING] >= 0 and stream[FIRST_PENDING] <= number:
        first = stream[FIRST_PENDING]
        _execute(words, first)
        stream[FIRST_PENDING] = _copy_words(words, first)[NEXT_ON_STREAM]


@register_jitable
def _is_at_once(words: Any) -> Any:
    return load_acquire(words, ALLOWED) == ALL and words[MOST_QUERIES] == 0


def _memcpy(destination: Any, source: Any, nbytes: Any, stream_handle: Any) -> Any:
    stream = _words_at(stream_handle, RECORD_WORDS)
    words = _words_at(stream[DRIVER], WORDS)
    result = _begin(words, MEMCPY_HTOD_ASYNC)
    number = words[COPIES]
    if result == SUCCESS and number >= words[ROOM]:
        result = INVALID_VALUE
    if result != SUCCESS:
        _log(words, MEMCPY_HTOD_ASYNC, result, -1, -1, stream[NUMBER])
        return types.int32(result)
    words[COPIES] = number + 1
    copy = _copy_words(words, number)
    copy[TO] = destination
    copy[FROM] = source
    copy[NBYTES] = nbytes
    copy[STREAM] = stream_handle
    copy[NEXT_ON_STREAM] = -1
    copy[DIGEST] = _digest(source, nbytes)
    if stream[FIRST_PENDING] < 0:
        stream[FIRST_PENDING] = number
    else:
        _copy_words(words, stream[LAST])[NEXT_ON_STREAM] = number
    stream[LAST] = number
    if _is_at_once(words):
        _execute_up_to(words, stream, number)
    _log(words, MEMCPY_HTOD_ASYNC, SUCCESS, number, -1, stream[NUMBER])
    return types.int32(SUCCESS)


def _record(event_handle: Any, stream_handle: Any) -> Any:
    event = _words_at(event_handle, RECORD_WORDS)
    stream = _words_at(stream_handle, RECORD_WORDS)
    words = _words_at(event[DRIVER], WORDS)
    result = _begin(words, EVENT_RECORD)
    if result == SUCCESS:
        event[WAITS_FOR] = stream[LAST]
        event[ON_STREAM] = stream_handle
        event[QUERIES] = 0
    _log(words, EVENT_RECORD, result, stream[LAST], event[NUMBER], stream[NUMBER])
    return types.int32(result)


def _query(event_handle: Any) -> Any:
    event = _words_at(event_handle, RECORD_WORDS)
    words = _words_at(event[DRIVER], WORDS)
    result = _begin(words, EVENT_QUERY)
    copy = event[WAITS_FOR]
    stream_number = -1
    # An event that was never recorded is complete (CUDA Driver API, cuEventQuery).
    if event[ON_STREAM] != 0:
        stream = _words_at(event[ON_STREAM], RECORD_WORDS)
        stream_number = stream[NUMBER]
        if result == SUCCESS and copy >= 0:
            record = _copy_words(words, copy)
            is_allowed = (
                load_acquire(record, IS_ALLOWED) == 1
                if load_acquire(words, IS_UNORDERED) == 1
                else copy < load_acquire(words, ALLOWED)
            )
            if record[IS_EXECUTED] == 0 and not (
                is_allowed and event[QUERIES] >= words[MOST_QUERIES]
            ):
                result = NOT_READY
            elif words[IS_UNORDERED] == 1:
                _execute(words, copy)
            else:
                _execute_up_to(words, stream, copy)
    event[QUERIES] += 1
    _log(words, EVENT_QUERY, result, copy, event[NUMBER], stream_number)
    return types.int32(result)


@njit(nogil=True)
def _finish(words: Any) -> None:
    for number in range(words[COPIES]):
        _execute(words, number)


@functools.cache
def _functions() -> tuple[Any, Any, Any]:
    """Compile the three functions, with C's calling convention and the driver's signatures."""
    word, half = types.int64, types.int32
    options = {"nopython": True, "cache": False}
    return (
        cfunc(half(word, word, word, word), **options)(_memcpy),
        cfunc(half(word, word), **options)(_record),
        cfunc(half(word), **options)(_query),
    )


def table() -> DriverTable:
    """Return the addresses, for `make_cuda_copier`."""
    return DriverTable(*(function.address for function in _functions()))


@dataclass(frozen=True)
class Call:
    """An entry of the log; see the columns above."""

    kind: int
    result: int
    copy: int
    event: int
    stream: int
    destination: int
    source: int
    nbytes: int
    is_completed: bool
    watch: int


class RecordingDriver:
    """Streams, events, the log, and how copies go.

    Parameters
    ----------
    room : int
        Entries of the log, and copies; a copy beyond is refused.
    """

    def __init__(self, room: int = 1 << 14) -> None:
        self.words = np.zeros(WORDS, dtype=np.int64)
        self.copies = np.zeros((room, COPY_WORDS), dtype=np.int64)
        self._log = np.zeros((room, LOG_WORDS), dtype=np.int64)
        self._watches = np.zeros((1 << 12, WATCH_WORDS), dtype=np.int64)
        self._records: list[Any] = []
        self._numbers = {"stream": 0, "event": 0}
        self.words[ALLOWED] = ALL
        self.words[LOG_ADDRESS] = self._log.ctypes.data
        self.words[COPIES_ADDRESS] = self.copies.ctypes.data
        self.words[WATCHES_ADDRESS] = self._watches.ctypes.data
        self.words[ROOM] = room

    # --- what the copier is given ---

    def stream(self) -> int:
        """Make a stream and return its handle."""
        record = self._make("stream")
        record[FIRST_PENDING] = -1
        record[LAST] = -1
        return int(record.ctypes.data)

    def event(self) -> int:
        """Make an event and return its handle."""
        record = self._make("event")
        record[WAITS_FOR] = -1
        return int(record.ctypes.data)

    def copier(self, leases: int) -> CudaCopier:
        """Return the real CUDA copier over this driver, with a stream of its own."""
        return make_cuda_copier(table(), self.stream(), [self.event() for _ in range(leases)])

    # --- how copies go ---

    def hold(self) -> None:
        """Let no copy end from now on, until `allow`."""
        self.allow(0)

    def allow(self, copies: int = ALL) -> None:
        """Let the first `copies` of all that are ever asked for be executed."""
        store_release(self.words, ALLOWED, copies)

    def delay(self, queries: int) -> None:
        """Let each event say NOT_READY `queries` times before it may be complete."""
        self.words[MOST_QUERIES] = queries

    def unordered(self) -> None:
        """Let each copy end by itself, when `allow_copy` says so."""
        store_release(self.words, IS_UNORDERED, 1)
        self.hold()

    def allow_copy(self, number: int) -> None:
        """Let one copy be executed, others before it or not; for `unordered`."""
        store_release(self.copies[number], IS_ALLOWED, 1)

    def fail(self, kind: int, call: int, result: int, *, sticky: bool = False) -> None:
        """Let a call of a kind fail, counted from 1; `sticky`: and all calls after it."""
        self.words[FAIL_WITH + kind] = result
        self.words[IS_STICKY] = int(sticky)
        store_release(self.words, FAIL_AT + kind, call)

    def finish(self) -> None:
        """Execute every copy that waits, as CUDA does in the end whether anyone asks or not."""
        _finish(self.words)

    # --- what was done ---

    def watch(self, begin: int, end: int, flag_address: int, sequence: int) -> None:
        """Note in the log whether a flag was set when the copies to these bytes were dealt with."""
        number = int(self.words[WATCHES])
        self._watches[number] = (begin, end, flag_address, sequence)
        store_release(self.words, WATCHES, number + 1)

    @property
    def calls(self) -> int:
        """How many calls there were, of all kinds."""
        return int(load_acquire(self.words, CALLS))

    def calls_of(self, kind: int) -> int:
        """How many calls there were of one kind."""
        return int(load_acquire(self.words, KIND_CALLS + kind))

    def log(self) -> list[Call]:
        """Return all calls so far, oldest first."""
        count = self.calls
        if count > len(self._log):
            raise AssertionError(f"the log has room for {len(self._log)} of {count} calls")
        return [
            Call(
                kind=int(row[KIND]),
                result=int(row[RESULT]),
                copy=int(row[COPY]),
                event=int(row[EVENT]),
                stream=int(row[STREAM_NUMBER]),
                destination=int(row[DESTINATION]),
                source=int(row[SOURCE]),
                nbytes=int(row[COPY_BYTES]),
                is_completed=bool(row[IS_COMPLETED]),
                watch=int(row[WATCH]),
            )
            for row in self._log[:count]
        ]

    def faults(self, *, is_over: bool = True, may_share: bool = False) -> list[str]:
        """Say in words what the calls so far show to be wrong; nothing where all is right.

        Every copy must be followed by a record of one event, that event must not be recorded
        again before it was seen complete, and it must be seen complete before the request of the
        copy is completed and before another copy comes from the same buffer. No source may have
        changed under a copy. `is_over`: no copy may be left that was not seen complete.
        `may_share`: neighbours are read at once, so several copies may come from one buffer; that
        it was not read into meanwhile is then shown by sources that have not changed.
        """
        return _judge(self.log(), self.copies, is_over, may_share)

    def _make(self, what: str) -> Any:
        record = np.zeros(RECORD_WORDS, dtype=np.int64)
        record[DRIVER] = self.words.ctypes.data
        record[NUMBER] = self._numbers[what]
        self._numbers[what] += 1
        self._records.append(record)
        return record


def _judge(calls: list[Call], copies: Any, is_over: bool, may_share: bool) -> list[str]:
    faults: list[str] = []
    event_of: dict[int, int] = {}  # of a copy that waits to be seen complete
    unrecorded: dict[int, int] = {}  # by stream, a copy without an event behind it
    under_way: dict[int, Call] = {}
    for position, call in enumerate(calls):
        if call.kind == MEMCPY_HTOD_ASYNC and call.result == SUCCESS:
            if call.stream in unrecorded:
                faults.append(f"call {position}: copy {unrecorded[call.stream]} got no event")
            unrecorded[call.stream] = call.copy
            for other in () if may_share else under_way.values():
                if _overlap(call.source, call.nbytes, other.source, other.nbytes):
                    faults.append(
                        f"call {position}: copy {call.copy} comes from the buffer of copy "
                        f"{other.copy}, which was not seen complete"
                    )
            under_way[call.copy] = call
            if call.is_completed:
                faults.append(f"call {position}: copy {call.copy} of a completed request")
        elif call.kind == EVENT_RECORD and call.result == SUCCESS:
            waiting = [copy for copy, event in event_of.items() if event == call.event]
            for copy in waiting:
                faults.append(
                    f"call {position}: event {call.event} recorded again, copy {copy} not seen"
                )
                del event_of[copy]
            own = unrecorded.pop(call.stream, None)
            if own is None:
                faults.append(f"call {position}: event {call.event} recorded behind no new copy")
            else:
                event_of[own] = call.event
        elif call.kind == EVENT_QUERY and call.result == SUCCESS:
            own = next((copy for copy, event in event_of.items() if event == call.event), None)
            if own is None:
                faults.append(f"call {position}: event {call.event} queried, no copy waits for it")
                continue
            del event_of[own]
            del under_way[own]
            if call.is_completed:
                faults.append(
                    f"call {position}: copy {own} seen complete after its request was completed"
                )
    if is_over:
        faults += [f"copy {copy} was never seen complete" for copy in under_way]
    faults += [
        f"the source of copy {number} changed under it"
        for number in np.flatnonzero(copies[:, CHANGED])
    ]
    return faults


def _overlap(begin: int, nbytes: int, other_begin: int, other_nbytes: int) -> bool:
    return begin < other_begin + other_nbytes and other_begin < begin + nbytes


class RecordingDevice(CpuDevice):
    """Host memory that is served as if it were a GPU's, through a recording driver.

    Parameters
    ----------
    driver : RecordingDriver
    """

    name = "recording"

    def __init__(self, driver: RecordingDriver) -> None:
        self.driver = driver
        self.is_closed = False

    def copier(self, leases: int) -> Any:
        """Return the real CUDA copier over the recording driver."""
        return self.driver.copier(leases)

    def destination(self, array: Any) -> Region:
        """Return the memory of a NumPy array as that of a GPU."""
        region = super().destination(array)
        return Region(region.address, region.nbytes, region.owner, DEVICE_MEMORY)

    def close(self) -> None:
        """Note that everything was given back."""
        self.is_closed = True
