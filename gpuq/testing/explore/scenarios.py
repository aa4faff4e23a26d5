"""The configurations that are searched, smallest systems that show each part at its worst."""

from __future__ import annotations

from collections.abc import Callable

from gpuq.host import records, tables
from gpuq.layout import COUNTS_SHIFT, State, Status
from gpuq.testing.explore.ledger import ABORTED, OK, Request
from gpuq.testing.explore.machine import STAGING_ADDRESS
from gpuq.testing.explore.memory import Words
from gpuq.testing.explore.schedule import Violation
from gpuq.testing.explore.stage import BUFFERED, DIRECT, Stage

Build = Callable[[Stage], Callable[[], None] | None]

ENDED = (OK, ABORTED)
_SECOND_NS = 10**9


def demand(condition: bool, what: str) -> None:
    """Raise a violation where a scenario's own expectation is not met."""
    if not condition:
        raise Violation(what)


# --- the queue ---------------------------------------------------------------------------------


def pulls(producers: int, rounds: int) -> Build:
    """Producers that each pull again and again, by more requests than there are slots."""

    def build(stage: Stage) -> None:
        for number in range(producers):
            begin = 8 * number
            requests = [stage.request(begin + 2 * r, begin + 2 * r + 2) for r in range(rounds)]

            def pull(requests: list[Request] = requests) -> None:
                for request in requests:
                    demand(stage.pull(request) == OK, "a pull failed")

            stage.fiber(f"producer{number}", pull)

    return build


def split(stage: Stage) -> None:
    """One fiber posts and another waits, more requests than slots."""
    requests = [stage.request(2 * i, 2 * i + 2) for i in range(3)]
    tickets = stage.mailbox("tickets", len(requests))

    def post() -> None:
        for i, request in enumerate(requests):
            tickets.put(stage.post(request), i)

    def wait() -> None:
        for i in range(len(requests)):
            demand(stage.wait(tickets.take(i)) == OK, "a wait failed")

    stage.fiber("producer", post)
    stage.fiber("waiter", wait)


def two_waiters(stage: Stage) -> Callable[[], None]:
    """Two fibers wait for one ticket, while a third waits to take the slot for the next lap."""
    first, second = stage.request(0, 2), stage.request(2, 4)
    ticket = stage.mailbox("ticket")
    statuses: list[int] = []

    def post() -> None:
        ticket.put(stage.post(first))
        demand(stage.pull(second) == OK, "the pull of the next lap failed")

    def wait() -> None:
        statuses.append(stage.wait(ticket.take()))

    stage.fiber("producer", post)
    stage.fiber("waiter0", wait)
    stage.fiber("waiter1", wait)

    def check() -> None:
        demand(sorted(statuses) == [OK, int(Status.STALE)], f"two waiters got {statuses}")

    return check


def onlooker(stage: Stage) -> None:
    """A fiber polls a ticket that another one waits for, into the next lap."""
    first, second = stage.request(0, 2), stage.request(2, 4)
    ticket = stage.mailbox("ticket")
    allowed = (OK, int(Status.PENDING), int(Status.STALE))

    def post() -> None:
        posted = stage.post(first)
        ticket.put(posted)
        demand(stage.wait(posted) == OK, "the wait failed")
        demand(stage.pull(second) == OK, "the pull of the next lap failed")

    def look() -> None:
        posted = ticket.take()
        for _ in range(2):
            status = int(stage.code.queue.poll(stage.queue, posted))
            demand(status in allowed, f"poll said {Status(status).name}")
            if status == OK:
                stage.note("seen OK")
            elif status == Status.STALE:
                demand(posted in stage.ledger.freed, "poll said STALE of an outstanding ticket")
                stage.note("seen STALE")

    stage.fiber("producer", post)
    stage.fiber("onlooker", look)


def try_posts(producers: int) -> Build:
    """Producers that post only where a slot is free at the moment."""

    def build(stage: Stage) -> None:
        for number in range(producers):
            request = stage.request(2 * number, 2 * number + 2)

            def post(request: Request = request) -> None:
                ticket = stage.post(request, "try_post_at")
                while ticket < 0:
                    demand(ticket == -Status.NO_SLOT, f"try_post returned {ticket}")
                    demand(producers > stage.capacity, "a slot is free, and try_post found none")
                    stage.note("no slot")
                    stage.world.relax()
                    ticket = stage.post(request, "try_post_at")
                demand(stage.wait(ticket) == OK, "the wait failed")

            stage.fiber(f"producer{number}", post)

    return build


def let_time_pass(stage: Stage) -> None:
    """Add a fiber that sets the clock ahead, whenever that may be; and where all wait, it moves."""
    time = Words(stage.world, "time", [1])

    def tick() -> None:
        stage.ops.store_relaxed(time, 0, time.peek(0) + _SECOND_NS)

    stage.world.time = time
    stage.world.tick = tick
    stage.fiber("time", tick)


def post_timeout(stage: Stage) -> None:
    """A post finds the queue full until its time is over; later ones find it as it was."""
    first, second, third = (stage.request(2 * i, 2 * i + 2) for i in range(3))
    posted, go = stage.mailbox("posted"), stage.mailbox("go")

    def hold() -> None:
        ticket = stage.post(first)
        posted.put(ticket)
        go.take()
        demand(stage.wait(ticket) == OK, "the wait failed")

    def post() -> None:
        posted.take()
        demand(stage.post(second) == -Status.NO_SLOT, "a full queue took a request")
        stage.note("timed out")
        go.put(0)
        demand(stage.pull(second) == OK, "no pull after a time-out")
        demand(stage.pull(third) == OK, "no second pull after a time-out")

    stage.fiber("holder", hold)
    stage.fiber("producer", post)
    let_time_pass(stage)


def wait_timeout(stage: Stage) -> None:
    """A wait times out, or not; the ticket stays valid."""
    requests = [stage.request(2 * i, 2 * i + 2) for i in range(2)]

    def pull() -> None:
        for request in requests:
            ticket = stage.post(request)
            status = stage.wait(ticket, 1000)
            if status == Status.TIMED_OUT:
                stage.note("timed out")
                status = stage.wait(ticket)
            demand(status == OK, f"the wait ended with {Status(status).name}")

    stage.fiber("producer0", pull)
    let_time_pass(stage)


def abandoned(stage: Stage) -> None:
    """A ticket that is claimed and never published holds up its own slot and no other."""
    requests = [stage.request(2 * i, 2 * i + 2) for i in range(3)]
    claimed = stage.mailbox("claimed")

    def abandon() -> None:
        claimed.put(int(stage.code.queue.claim(stage.queue)))

    def pull() -> None:
        claimed.take()
        for request in requests:
            demand(stage.pull(request) == OK, "a pull behind an abandoned ticket failed")

    stage.fiber("quitter", abandon)
    stage.fiber("producer", pull)


# --- counted requests --------------------------------------------------------------------------


def counted(stage: Stage) -> None:
    """Two producers of counted requests, more than slots, and one wait for all of them."""
    requests = [stage.request(2 * i, 2 * i + 2) for i in range(4)]

    def post(mine: list[Request]) -> None:
        for request in mine:
            demand(stage.post_counted(request) == OK, "a counted post failed")

    def wait() -> None:
        demand(stage.wait_counter(len(requests)) == OK, "the wait failed")
        for request in requests:
            stage.ledger.read(request)

    stage.fiber("producer0", lambda: post(requests[:2]))
    stage.fiber("producer1", lambda: post(requests[2:]))
    stage.fiber("waiter", wait)


def counted_mix(stage: Stage) -> None:
    """Counted requests and pulls take turns in the same slots; one counted request fails."""
    good, pulled = stage.request(0, 2), stage.request(2, 4)
    bad = stage.request(4, 6, int(Status.BAD_SOURCE), source=stage.source + (1 << 32))

    def post() -> None:
        for request in (good, bad):
            demand(stage.post_counted(request) == OK, "a counted post failed")
        demand(stage.wait_counter(2) == Status.BAD_SOURCE, "a failure was not reported")
        stage.ledger.read(good)

    stage.fiber("producer0", post)
    stage.fiber("producer1", lambda: demand(stage.pull(pulled) == OK, "a pull failed"))


def counted_shares(stage: Stage) -> Callable[[], None]:
    """Two waiters share a counter: each answer is taken once."""
    requests = [stage.request(2 * i, 2 * i + 2) for i in range(3)]

    def post() -> None:
        for request in requests:
            demand(stage.post_counted(request) == OK, "a counted post failed")

    stage.fiber("producer", post)
    stage.fiber("waiter0", lambda: demand(stage.wait_counter(1) == OK, "wait 0 failed"))
    stage.fiber("waiter1", lambda: demand(stage.wait_counter(2) == OK, "wait 1 failed"))

    def check() -> None:
        taken = stage.queue.taken.peek(0) >> COUNTS_SHIFT
        demand(taken == len(requests), f"{taken} answers were taken of {len(requests)}")

    return check


# --- pieces, reads and copies ------------------------------------------------------------------


def pieces(*ranges: tuple[int, int], statuses: tuple[int, ...] = (OK,)) -> Build:
    """A fiber posts requests of several pieces, then waits for all."""

    def build(stage: Stage) -> None:
        requests = [stage.request(start, end, *statuses) for start, end in ranges]

        def pull() -> None:
            tickets = [stage.post(request) for request in requests]
            for ticket in tickets:
                demand(stage.wait(ticket) in statuses, "an unexpected status")
            stage.notes["faults"] = stage.notes.get("faults", 0) + stage.machine.faults_seen

        stage.fiber("producer", pull)

    return build


def neighbours(*ranges: tuple[int, int], statuses: tuple[int, ...] = (OK,)) -> Build:
    """A fiber posts requests that one read may serve; what is behind the file's end fails alone."""

    def build(stage: Stage) -> None:
        size = len(stage.machine.files[BUFFERED].data)
        missing = int(Status.END_OF_FILE)
        requests = [
            stage.request(start, end, *(statuses if end <= size else (missing,)))
            for start, end in ranges
        ]

        def pull() -> None:
            tickets = [stage.post(request) for request in requests]
            got = [stage.wait(ticket) for ticket in tickets]
            failed = sum(status not in (OK, missing) for status in got)
            demand(failed <= stage.machine.faults_seen, "a fault failed more than one request")
            stage.notes["faults"] = stage.notes.get("faults", 0) + stage.machine.faults_seen
            if stage.poller.statistics[records.STATISTICS_MERGED]:
                stage.note("merged")

        stage.fiber("producer", pull)

    return build


def two_files(stage: Stage) -> None:
    """Ranges that would be neighbours if they were of one file."""
    other = stage.open(DIRECT + 2, 64, 2)
    requests = [stage.request(0, 2), stage.request(2, 4, source=other), stage.request(2, 4)]

    def pull() -> None:
        tickets = [stage.post(request) for request in requests]
        for ticket in tickets:
            demand(stage.wait(ticket) == OK, "a pull failed")
        if stage.poller.statistics[records.STATISTICS_MERGED]:
            stage.note("merged")

    stage.fiber("producer", pull)


def neighbours_end(state: State) -> Build:
    """Neighbours are on their way when the queue ends."""

    def build(stage: Stage) -> None:
        requests = [stage.request(2 * i, 2 * i + 2, *ENDED) for i in range(2)]

        def pull() -> None:
            tickets = [stage.post(request) for request in requests]
            for ticket in tickets:
                demand(ticket < 0 or stage.wait(ticket) in ENDED, "an unexpected status")
            if stage.poller.statistics[records.STATISTICS_MERGED]:
                stage.note("merged")

        stage.fiber("producer", pull)
        stage.fiber("host", lambda: stage.raise_state(state), is_host=True)

    return build


def end_of_file(stage: Stage) -> None:
    """Requests up to the end of a file, over it and behind it."""
    size = len(stage.machine.files[BUFFERED].data)
    expected = [
        (stage.request(size - 3, size), OK),
        (stage.request(size - 2, size + 1, int(Status.END_OF_FILE)), Status.END_OF_FILE),
        (stage.request(size + 2, size + 3, int(Status.END_OF_FILE)), Status.END_OF_FILE),
        (stage.request(size - 6, size + 1, int(Status.END_OF_FILE)), Status.END_OF_FILE),
    ]

    def pull() -> None:
        for request, status in expected:
            demand(stage.pull(request) == status, "an unexpected status")

    stage.fiber("producer", pull)


def fairness(stage: Stage) -> Callable[[], None]:
    """A request of one piece is not kept waiting by one of many that came before it."""
    large, small = stage.request(0, 16), stage.request(20, 22)
    posted: list[int] = []

    def pull() -> None:
        tickets = [stage.post(large), stage.post(small)]
        posted.append(len(stage.machine.reads))
        for ticket in tickets:
            demand(stage.wait(ticket) == OK, "a pull failed")

    stage.fiber("producer", pull)

    def check() -> None:
        tickets = [read.ticket for read in stage.machine.reads[posted[0] :]]
        if 1 in tickets:
            # One piece in the pass that did not see the small request yet, one in its turn.
            demand(tickets.index(1) <= 2, f"{tickets.index(1)} pieces went first")

    return check


# --- the end -----------------------------------------------------------------------------------


def ends(*states: State, rounds: int = 1, span: int = 2) -> Build:
    """Two producers pull while host threads end the queue, each in its way."""

    def build(stage: Stage) -> None:
        for number in range(2):
            begin = 16 * number
            requests = [
                stage.request(begin + span * r, begin + span * (r + 1), *ENDED)
                for r in range(rounds)
            ]

            def pull(requests: list[Request] = requests) -> None:
                for request in requests:
                    status = stage.pull(request)
                    demand(status in ENDED, f"a pull got {Status(status).name}")
                    stage.note(Status(status).name)

            stage.fiber(f"producer{number}", pull)
        for state in states:
            stage.fiber(
                f"host, {state.name.lower()}",
                lambda state=state: stage.raise_state(state),  # type: ignore[misc]
                is_host=True,
            )

    return build


def promised(stage: Stage) -> None:
    """What was posted before the queue closes is served, also where nobody else tells the host."""
    requests = [stage.request(2 * i, 2 * i + 2) for i in range(2)]
    posted = stage.mailbox("posted")

    def post() -> None:
        tickets = [stage.post(request) for request in requests]
        posted.put(0)
        for ticket in tickets:
            demand(stage.wait(ticket) == OK, "what was posted before closing was not served")

    def close() -> None:
        posted.take()
        stage.raise_state(State.CLOSING)

    stage.fiber("producer", post)
    stage.fiber("host", close, is_host=True)


def counted_ends(state: State) -> Build:
    """A wait for counted requests when the queue ends."""

    def build(stage: Stage) -> None:
        requests = [stage.request(2 * i, 2 * i + 2, *ENDED) for i in range(2)]

        def pull() -> None:
            posted = sum(stage.post_counted(request) == OK for request in requests)
            stage.note(Status(stage.wait_counter(posted)).name)

        stage.fiber("producer", pull)
        stage.fiber("host", lambda: stage.raise_state(state), is_host=True)

    return build


# --- capability tables -------------------------------------------------------------------------


def reopened(stage: Stage) -> None:
    """A file is closed, and another one opened in its entry, while a fiber reads the first."""
    allowed = (OK, int(Status.OUT_OF_BOUNDS), int(Status.BAD_SOURCE))
    new = stage.request(0, 2)
    # The second one is refused by what stands in the entry, so IN_FLIGHT never tells of it.
    old = [stage.request(0, 2, *allowed), stage.request(0, 300, *allowed)]
    handle = stage.mailbox("handle")

    def pull_old() -> None:
        for request in old:
            status = stage.pull(request)
            demand(status in allowed, f"a pull got {Status(status).name}")
            stage.note(Status(status).name)

    def reopen() -> None:
        stage.host.close_entry(stage.sources, stage.source)
        stage.close(DIRECT)
        handle.put(stage.open(DIRECT + 2, 64, 2))

    def pull_new() -> None:
        new.source = handle.take()
        new.data = stage.machine.files[DIRECT + 2].data[new.start : new.end]
        demand(stage.pull(new) == OK, "a pull of the new file failed")

    stage.fiber("producer", pull_old)
    stage.fiber("host", reopen, is_host=True)
    stage.fiber("successor", pull_new)


def unregistered(stage: Stage) -> None:
    """A destination is let go, and its memory used for something else, while bytes come in."""
    allowed = (OK, int(Status.BAD_DESTINATION))
    request = stage.request(0, 2, *allowed)
    request.data = []  # by the time the fiber looks, the memory may be another's
    address = stage.destinations.words.peek(tables.ADDRESS)

    def pull() -> None:
        status = stage.pull(request)
        demand(status in allowed, f"a pull got {Status(status).name}")
        stage.note(Status(status).name)

    def let_go() -> None:
        stage.host.close_entry(stage.destinations, stage.destination)
        for i in range(4):
            stage.machine.memory.store(address + i, 0)

    stage.fiber("producer", pull)
    stage.fiber("host", let_go, is_host=True)


# --- the threads reader ------------------------------------------------------------------------


def rings(jobs: int) -> Build:
    """The poller's side of the two rings, with jobs as quick as leases allow, then the end."""

    def build(stage: Stage) -> None:
        contract = stage.code.reader
        leases = list(range(stage.buffers))
        data = stage.machine.files[DIRECT].data

        def drive() -> None:
            free = list(leases)
            expected: dict[int, int] = {}
            submitted = done = 0
            while done < jobs:
                while free and submitted < jobs:
                    lease = free.pop(0)
                    address = STAGING_ADDRESS + lease * stage.buffer_bytes
                    expected[lease] = 2 * submitted
                    contract.submit_read(stage.reader, lease, DIRECT, 2 * submitted, address, 2)
                    submitted += 1
                contract.flush_reads(stage.reader)
                lease, result = contract.reap_read(stage.reader)
                if lease < 0:
                    stage.world.relax()
                    continue
                demand(lease in expected, f"lease {lease} was answered and not asked for")
                offset = expected.pop(lease)
                demand(result == 2, f"a read returned {result}")
                for i in range(2):
                    address = STAGING_ADDRESS + lease * stage.buffer_bytes + i
                    byte = stage.machine.memory.load(address)
                    demand(byte == data[offset + i], "the bytes of another job")
                free.append(lease)
                done += 1
            stage.threads.stop(1.0)

        stage.fiber("poller", drive, is_host=True)

    return build
