"""Gates: kernels that hold a stream until the host opens them.

A gate kernel spins, and whatever was put on its stream behind it waits. Tests and `gpuq.race`
need that to force an order; nothing that serves requests uses it. One source for all targets::

    number   a stream's gates are numbered from 1 in the order in which the stream comes to them.
    reach    the kernel stores REACHED = number with release: the host knows that the stream is
             held there, and that all before it on the stream has ended.
    open     the host stores OPENED = number with release: that gate and those before it are open.
    leave    the kernel stores OUTCOME = number << OUTCOME_SHIFT | status with release.

===================  =================  ===========================
word                 writer             order
===================  =================  ===========================
OPENED               the host           release / acquire, system
REACHED, OUTCOME     the gate kernel    release / acquire, system
control              the host           release / acquire, system
===================  =================  ===========================

A gate that is never opened ends all the same: its kernel returns when the time is over, or when
the STATE in the control words it was given says closed or aborted.

A spinning kernel must find itself and all that is to run beside it loaded: launch it once with an
open gate first, since the first launch of a kernel may wait until running ones have ended.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from gpuq.compiling import compiled, protocol
from gpuq.layout import LINE_WORDS, STATE, State, Status
from gpuq.ordering import as_signed, as_word, clock_ns, load_acquire, relax, store_release

OPENED = 0
REACHED = LINE_WORDS
OUTCOME = LINE_WORDS + 1
OUTCOME_SHIFT = 8
GATE_WORDS = 2 * LINE_WORDS

_OK = int(Status.OK)
_TIMED_OUT = int(Status.TIMED_OUT)
_ABORTED = int(Status.ABORTED)
_PENDING = int(Status.PENDING)
_CLOSED = int(State.CLOSED)
_LONGEST_NS = 1 << 61


class Gate(NamedTuple):
    """What a gate kernel is handed; arrays in a tuple are shared in the simulator, too.

    Attributes
    ----------
    words : array of uint64, shape (GATE_WORDS,)
        Mapped host memory, zero in the beginning; of one stream.
    control : array of uint64, shape (CONTROL_WORDS,)
        Mapped host memory: a queue's, or zeros where no queue is to end the wait.
    """

    words: Any
    control: Any


@protocol
def pass_gate(gate: Any, number: Any, timeout_ns: Any) -> Any:
    """Say that a gate is reached, and wait until it is open.

    Parameters
    ----------
    gate : Gate
    number : int
        Of the gate on its stream, from 1.
    timeout_ns : int
        Longest wait, in nanoseconds.

    Returns
    -------
    int
        ``Status.OK``: the host opened it. ``TIMED_OUT``: it did not. ``ABORTED``: the control
        words say that the queue is closed or aborted. The same is in OUTCOME.
    """
    # Pairs with the host's acquire in `has_reached`.
    store_release(gate.words, REACHED, as_word(number))
    status = _PENDING
    spins = 0
    deadline = clock_ns() + min(max(as_signed(timeout_ns), 0), _LONGEST_NS)
    while status == _PENDING:
        # Pairs with the host's release in `open_gate`.
        if as_signed(load_acquire(gate.words, OPENED)) >= number:
            status = _OK
        elif as_signed(load_acquire(gate.control, STATE)) >= _CLOSED:
            status = _ABORTED
        elif clock_ns() >= deadline:
            status = _TIMED_OUT
        else:
            relax(spins)
            spins += 1
    # Pairs with the host's acquire in `outcome_of`.
    store_release(gate.words, OUTCOME, as_word(number << OUTCOME_SHIFT | status))
    return status


pass_gate_on_cpu = compiled(pass_gate)
"""`pass_gate` for the CPU target."""


@functools.cache
def gate_kernel() -> Any:
    """Return the kernel ``(gate, number, timeout_ns)``, for one thread of one block."""
    from numba import cuda

    @cuda.jit
    def hold_stream(gate: Any, number: Any, timeout_ns: Any) -> None:
        pass_gate(gate, number, timeout_ns)

    return hold_stream


# --- the host's side, given the host's view of the words -----------------------------------


def open_gate(words: Any, number: int) -> None:
    """Open a gate and all before it, reached or not."""
    if number > int(load_acquire(words, OPENED)):
        store_release(words, OPENED, as_word(number))


def has_reached(words: Any, number: int) -> bool:
    """Say whether the stream has come to a gate."""
    return int(load_acquire(words, REACHED)) >= number


def outcome_of(words: Any, number: int) -> Status:
    """Return how a stream left a gate, PENDING where it has not; of the last one only."""
    word = int(load_acquire(words, OUTCOME))
    if word >> OUTCOME_SHIFT != number:
        return Status.PENDING
    return Status(word & ((1 << OUTCOME_SHIFT) - 1))


assert max(Status) < 1 << OUTCOME_SHIFT
assert OPENED // LINE_WORDS != REACHED // LINE_WORDS == OUTCOME // LINE_WORDS
