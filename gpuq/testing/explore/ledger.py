"""What was asked for, answered, freed and consumed in one schedule, and what must hold of it.

- a ticket is given out once, completes exactly once, and one waiter gets its status;
- that status is one that its own request may get;
- a slot is freed after its answer, and used again after it was freed;
- when a request completes, nothing of it is in flight and its bytes are in the destination;
- STALE is for tickets that somebody consumed, ABORTED for queues that have ended;
- what was posted before a queue began to close is answered.

The ledger is told by hooks on the words themselves, so it knows before any fiber can.
"""

from __future__ import annotations

from dataclasses import dataclass

from gpuq.layout import (
    COUNTED,
    COUNTS,
    COUNTS_SHIFT,
    FLAG_SEQUENCE_SHIFT,
    FLAG_STATUS_MASK,
    FLAG_WORDS,
    SEQUENCE,
    STATE,
    SUBMISSION_WORDS,
    State,
    Status,
)
from gpuq.testing.explore.machine import Machine
from gpuq.testing.explore.schedule import Violation, World

OK, STALE, ABORTED = int(Status.OK), int(Status.STALE), int(Status.ABORTED)


@dataclass(eq=False)
class Request:
    """What a fiber asks for, and what it must get.

    Attributes
    ----------
    start, end : int
    offset : int
        In the destination; each request has room of its own.
    address : int
        Of the first byte there.
    statuses : set of int
        Those that it may complete with.
    source, destination : int
        Handles.
    data : list of int
        What the file holds in the range.
    """

    start: int
    end: int
    offset: int
    address: int
    statuses: frozenset[int]
    source: int
    destination: int
    data: list[int]


class Ledger:
    """The books of one schedule.

    Parameters
    ----------
    world : World
    machine : Machine
    capacity : int
    first : int
        The first ticket.

    Attributes
    ----------
    requests : dict of int to Request
        By ticket, from the moment in which it is published.
    answers, consumed : dict of int to int
        Statuses by ticket.
    freed : set of int
        Tickets whose slots were freed.
    promised : set of int
        Tickets that must be answered before the queue is closed.
    """

    def __init__(self, world: World, machine: Machine, capacity: int, first: int) -> None:
        self.requests: dict[int, Request] = {}
        self.answers: dict[int, int] = {}
        self.freed: set[int] = set()
        self.consumed: dict[int, int] = {}
        self.promised: set[int] = set()
        self.counts = 0
        self.state = int(State.RUNNING)
        self._world = world
        self._machine = machine
        self._capacity = capacity
        self._first = first
        self._published_at: dict[int, tuple[int, int]] = {}

    # --- what words say when they change ---

    def published(self, index: int, _before: int, value: int) -> None:
        """A submission's word was stored."""
        if index % SUBMISSION_WORDS != SEQUENCE:
            raise Violation("a payload word was stored atomically")
        ticket = value - 1
        slot = index // SUBMISSION_WORDS
        if ticket & (self._capacity - 1) != slot or ticket < self._first:
            raise Violation(f"ticket {ticket} is published in slot {slot}")
        if ticket in self.requests:
            raise Violation(f"ticket {ticket} was given out twice")
        last = ticket - self._capacity
        if last >= self._first and last not in self.freed:
            raise Violation(f"ticket {ticket} is published in a slot that was not freed")
        fiber = self._world.current
        self.requests[ticket] = fiber.work
        self._published_at[ticket] = (fiber.number, fiber.clock[fiber.number] - 1)

    def answered(self, index: int, _before: int, value: int) -> None:
        """A completion flag was stored."""
        ticket = (value >> FLAG_SEQUENCE_SHIFT) - 1
        status = value & FLAG_STATUS_MASK
        request = self.requests.get(ticket)
        if request is None or index != (ticket & (self._capacity - 1)) * FLAG_WORDS:
            raise Violation(f"flags[{index}] answers ticket {ticket}, which is not posted there")
        if ticket in self.answers:
            raise Violation(f"ticket {ticket} was answered twice")
        if status not in request.statuses:
            raise Violation(f"ticket {ticket} is answered {name_of(status)}")
        for transfer in self._machine.of_ticket(ticket):
            raise Violation(f"ticket {ticket} is answered while a {transfer.what} is in flight")
        if status == OK:
            for i, byte in enumerate(request.data):
                if self._machine.memory.peek(request.address + i) != byte:
                    raise Violation(f"ticket {ticket} is answered OK and byte {i} is wrong")
        self.answers[ticket] = status

    def turned(self, slot: int, before: int, value: int) -> None:
        """A slot's turn was stored."""
        if value == before + COUNTED:
            return  # a counted request takes a slot that was freed before
        if before >= COUNTED:
            before -= COUNTED
            value &= COUNTED - 1  # the next producer frees a counted request's slot
        if before not in self.answers:
            raise Violation(f"slot {slot} is freed and ticket {before} has no answer")
        if value != before + self._capacity:
            raise Violation(f"slot {slot} is freed from {before} to {value}")
        self.freed.add(before)

    def counted(self, index: int, _before: int, value: int) -> None:
        """A counter's word was stored."""
        if index == COUNTS:
            self.counts = value >> COUNTS_SHIFT

    def taken(self, _index: int, _before: int, value: int) -> None:
        """Answers were taken from a counter: not more than there are."""
        if value >> COUNTS_SHIFT > self.counts:
            raise Violation(f"{value >> COUNTS_SHIFT} answers are taken of {self.counts}")

    def raised(self, index: int, _before: int, value: int) -> None:
        """A control word was stored, of the host's or of what kernels are shown."""
        if index != STATE:
            return
        if value == State.CLOSING > self.state:
            # Where loads may be stale, "before" is what the host has seen, not what came first.
            clock = self._world.current.clock
            self.promised = {
                ticket
                for ticket, (fiber, at) in self._published_at.items()
                if at <= clock[fiber] or not self._world.has_stale
            }
        self.state = max(self.state, value)

    # --- what fibers say ---

    def waited(self, ticket: int, status: int) -> None:
        """A wait returned."""
        if status == STALE:
            if ticket not in self.freed:
                raise Violation(f"ticket {ticket} is STALE and nobody consumed it")
        elif status == ABORTED:
            self.aborted(ticket)
        elif status != Status.TIMED_OUT:
            if ticket in self.consumed:
                raise Violation(f"ticket {ticket} was consumed twice")
            self.consumed[ticket] = status
            answer = self.answers.get(ticket)
            if answer != status:
                raise Violation(
                    f"ticket {ticket} got {name_of(status)}, its answer is {name_of(answer)}"
                )

    def aborted(self, ticket: int) -> None:
        """Somebody was told that no answer will come."""
        if self.state not in (State.CLOSED, State.ABORTED):
            raise Violation(f"ticket {ticket} is ABORTED and the queue has not ended")

    def read(self, request: Request) -> None:
        """Read a request's bytes like a kernel does: each read must be ordered after the copy."""
        for i, value in enumerate(request.data):
            if self._machine.memory.load(request.address + i) != value:
                raise Violation(f"byte {i} of [{request.start}, {request.end}) is wrong")

    def check_promises(self) -> None:
        """The queue is closed."""
        for ticket in self.promised:
            if ticket not in self.answers:
                raise Violation(f"ticket {ticket} was posted before closing and never answered")


def name_of(status: int | None) -> str:
    """Return a status by name."""
    return "missing" if status is None else Status(status).name
