"""The host's half of the protocol: admit, issue, reap, copy, retire.

`poll_once` is one bounded step and `serve` a loop around it. Both are compiled and hold no
interpreter lock. A request's record is its slot, a piece's record is its lease; nothing
allocates while serving.
"""

from __future__ import annotations

from typing import Any

from gpuq.compiling import compiled, inlined
from gpuq.host.admission import admit, seal
from gpuq.host.arrival import reap
from gpuq.host.copying import retire
from gpuq.host.issuing import hand_over, issue
from gpuq.host.libc import sleep_ns, thread_cpu_ns
from gpuq.host.reader import await_read
from gpuq.host.records import (
    COPIES,
    FAILURE,
    IDLE_CPU_NS,
    IDLE_SINCE_NS,
    IDLE_SLEEP_NS,
    IS_SEALED,
    READS,
    REQUESTS,
    SILENCE_NS,
    STATISTICS_HIGH_WATER,
    are_large,
    end_queue,
)
from gpuq.host.staging import HIGH_WATER
from gpuq.layout import HEARTBEAT, REVISION, REVISION_SEEN, STATE, State
from gpuq.ordering import (
    as_signed,
    as_word,
    clock_ns,
    load_acquire,
    load_relaxed,
    relax,
    store_release,
)

_CLOSING = int(State.CLOSING)
_CLOSED = int(State.CLOSED)
_ABORTED = int(State.ABORTED)
_YIELD_AFTER = 64
_SLEEP_AFTER = 512
_SLEEP_NS = 100_000
_LONG_SILENCE_NS = 100_000
_LONGEST_SILENCE_NS = 1_600_000
"""What is learned is cut to this: a post waits for the rest of a sleep, a millisecond at most."""
_SLEEP_LONG_AFTER = 2_000
SLEEP_LONG_NS = 200_000
_SLEEP_LONGEST_NS = 2_000_000
_SLEEPS_PER_LOOK = 256
_MOST_OF_A_CORE = 60  # an idle poller takes at most one part in so many of a core


@compiled
def poll_once(p: Any) -> Any:
    """Do one bounded step of everything; return how much was done."""
    store_release(p.shown, HEARTBEAT, load_relaxed(p.shown, HEARTBEAT) + as_word(1))
    # Pairs with the host's fetch-and-add in `Service.close_entry`, see there.
    store_release(p.control, REVISION_SEEN, load_acquire(p.control, REVISION))
    done = retire(p) + reap(p)
    state = as_signed(load_acquire(p.control, STATE))
    if state != _ABORTED:
        if state != _CLOSING:
            done += admit(p)
        elif p.cursor[IS_SEALED] == 0:
            done += seal(p)
        done += issue(p)
        store_release(p.statistics, STATISTICS_HIGH_WATER, p.staging.counts[HIGH_WATER])
    hand_over(p)
    return done


@inlined
def rest(p: Any, idle: Any) -> None:
    """Let others run, the longer the more passes in a row did nothing."""
    reads = p.cursor[READS]
    if idle < _YIELD_AFTER:
        relax(0)
    elif idle == _YIELD_AFTER:
        expect_silence(p)
    elif are_large(p) and p.cursor[COPIES] == 0:
        # They take longer than a wake-up; looking meanwhile costs a core for nothing.
        await_read(p.reader, max(_SLEEP_NS, p.cursor[SILENCE_NS] // 2))
    elif idle < _SLEEP_AFTER:
        relax(idle)
    elif reads > 0:
        await_read(p.reader, _SLEEP_NS)
    elif idle < _SLEEP_LONG_AFTER:
        sleep_ns(_SLEEP_NS)
    else:
        if idle == _SLEEP_LONG_AFTER:
            p.cursor[IDLE_CPU_NS] = thread_cpu_ns()
            p.cursor[IDLE_SLEEP_NS] = SLEEP_LONG_NS
        elif (idle - _SLEEP_LONG_AFTER) % _SLEEPS_PER_LOOK == 0:
            set_idle_sleep(p)
        sleep_ns(p.cursor[IDLE_SLEEP_NS])


@inlined
def set_idle_sleep(p: Any) -> None:
    """Sleep at a time as long as a wake-up's processor time asks for.

    A wake-up costs 3 us on one machine and 15 on another, which the first sleeps have shown.
    """
    now = thread_cpu_ns()
    cost = (now - p.cursor[IDLE_CPU_NS]) // _SLEEPS_PER_LOOK
    p.cursor[IDLE_CPU_NS] = now
    p.cursor[IDLE_SLEEP_NS] = min(max(cost * _MOST_OF_A_CORE, SLEEP_LONG_NS), _SLEEP_LONGEST_NS)


@inlined
def expect_silence(p: Any) -> None:
    """Sleep through more than half of the time in which nothing will happen, where that is long.

    Storage that answers in lots is silent between them, and a kernel that waits for the lot posts
    nothing. A read that ends earlier wakes the poller; a post waits for the rest of the sleep.
    """
    p.cursor[IDLE_SINCE_NS] = clock_ns() if p.cursor[READS] > 0 else 0
    silence = p.cursor[SILENCE_NS]
    # The end of a copy wakes nobody.
    if p.cursor[READS] > 0 and p.cursor[COPIES] == 0 and silence >= _LONG_SILENCE_NS:
        await_read(p.reader, silence * 5 // 8)


@inlined
def note_silence(p: Any) -> None:
    """Learn from a silence that is over: at once where it was short, slowly where it was long."""
    since = p.cursor[IDLE_SINCE_NS]
    if since > 0:
        lasted, before = min(clock_ns() - since, _LONGEST_SILENCE_NS), p.cursor[SILENCE_NS]
        p.cursor[SILENCE_NS] = lasted if lasted < before else before + (lasted - before) // 8
        p.cursor[IDLE_SINCE_NS] = 0


@compiled
def serve(p: Any) -> Any:
    """Serve until the queue is closed and drained, or aborted; return an errno, 0 for none.

    On return of 0 no read and no copy is in flight. A reader that fails ends the queue at once,
    and its reads may still be in flight: their buffers must outlive them.
    """
    idle = 0
    while True:
        done = poll_once(p)
        if p.cursor[FAILURE] != 0:
            return p.cursor[FAILURE]
        if done > 0:
            note_silence(p)
            idle = 0
        else:
            idle += 1
            state = as_signed(load_acquire(p.control, STATE))
            if state == _ABORTED and p.cursor[READS] == 0 and p.cursor[COPIES] == 0:
                return 0
            if p.cursor[IS_SEALED] == 1 and p.cursor[REQUESTS] == 0:
                end_queue(p, _CLOSED)
                return 0
            rest(p, idle)
