"""Deliberate faults, each a small change of one of the product's functions, made in memory only.

A mutant names the text that it changes. When that text changes in the product, the mutant fails
to build and says so, rather than to test something that is no longer there.
"""

from __future__ import annotations

from dataclasses import dataclass

from gpuq.testing.explore import Edit


@dataclass(frozen=True)
class Mutant:
    """A fault, and the configurations that must show it.

    Attributes
    ----------
    name : str
    edits : tuple of Edit
    configurations : tuple of str
        Searched in this order until one of them shows the fault.
    """

    name: str
    edits: tuple[Edit, ...]
    configurations: tuple[str, ...]


def _mutant(name: str, configuration: str, *edits: tuple[str, str, str]) -> Mutant:
    return Mutant(name, tuple(Edit(*edit) for edit in edits), tuple(configuration.split(" / ")))


_PUBLISH = "store_release(words, base + SEQUENCE, as_word(ticket + 1))"
_ADMIT = "load_acquire(words, base + SEQUENCE)"
_FLAG = "store_release(p.flags, slot * FLAG_WORDS"
_LOOK = "load_acquire(q.flags, "
_CLAIM = "before = as_signed(compare_exchange(q.tail, 0, as_word(ticket), as_word(ticket + 1)))"
_CONSUME = (
    "turn = compare_exchange(q.turns, slot, as_word(ticket), as_word(ticket + q.capacity))\n"
    "    return status if as_signed(turn) == ticket else _STALE"
)
_TAKE = "seen = compare_exchange(q.taken, counter * LINE_WORDS, as_word(taken), as_word(now_taken))"
_TAKEN = "taken = as_signed(load_acquire_device(q.taken, counter * LINE_WORDS))"
_ANSWERED = "return flag_of(q, before) >> FLAG_SEQUENCE_SHIFT == before + 1"
_FREE_ANYHOW = (
    "store_release_device(q.turns, slot, as_word(ticket + q.capacity))\n    return status"
)

MUTANTS = (
    # --- publish and admit ---
    _mutant(
        "the sequence is published before the payload",
        "pull, 2 slots",
        ("queue.publish_with", _PUBLISH, "pass"),
        (
            "queue.publish_with",
            "words[base + SOURCE] = as_word(source)",
            f"{_PUBLISH}\n    words[base + SOURCE] = as_word(source)",
        ),
    ),
    _mutant(
        "the sequence is published without release",
        "pull, 2 slots",
        ("queue.publish_with", _PUBLISH, _PUBLISH.replace("release", "relaxed")),
    ),
    _mutant(
        "the sequence is loaded without acquire",
        "pull, 2 slots",
        ("admission.admit_slot", _ADMIT, _ADMIT.replace("acquire", "relaxed")),
    ),
    _mutant(
        "a submission is admitted again",
        "pull, 2 slots",
        (
            "admission.admit_slot",
            "p.expected[slot] = ticket + p.capacity",
            "p.expected[slot] = ticket",
        ),
    ),
    _mutant(
        "the published ticket is cut to 32 bits",
        "pull, 2**32 tickets",
        ("queue.publish_with", "as_word(ticket + 1)", "as_word((ticket + 1) & 0xFFFFFFFF)"),
    ),
    # --- claim ---
    _mutant(
        "no check of the turn",
        "pull, 1 slot",
        ("queue.claim_marked", "if is_free(q, turn, ticket):", "if True:"),
    ),
    _mutant(
        "the turn is loaded without acquire",
        "split",
        ("queue.claim_marked", "load_acquire_device(q.turns", "load_relaxed(q.turns"),
    ),
    _mutant(
        "a ticket is taken by load and store",
        "pull, 2 slots",
        (
            "queue.claim_marked",
            _CLAIM,
            "before = as_signed(load_relaxed(q.tail, 0))\n"
            "            store_relaxed(q.tail, 0, as_word(ticket + 1))",
        ),
    ),
    _mutant(
        "a ticket is taken before its slot is free, and left behind by a time-out",
        "post time-out",
        (
            "queue.claim_marked",
            "ticket = as_signed(load_relaxed(q.tail, 0))\n",
            "ticket = as_signed(fetch_add(q.tail, 0, as_word(1)))\n"
            "    turn = as_signed(load_acquire_device(q.turns, ticket & (q.capacity - 1)))\n"
            "    return ticket if turn == ticket else -_NO_SLOT\n",
        ),
    ),
    # --- answer and consume ---
    _mutant(
        "the flag is stored without release",
        "pull, 2 slots",
        ("completion.complete", _FLAG, _FLAG.replace("release", "relaxed")),
    ),
    _mutant(
        "the flag is loaded without acquire",
        "pull, 2 slots",
        ("queue.flag_of", _LOOK, _LOOK.replace("acquire", "relaxed")),
    ),
    _mutant(
        "the flag is loaded at device scope",
        "pull, 2 slots",
        ("queue.flag_of", _LOOK, _LOOK.replace("acquire", "acquire_device")),
    ),
    _mutant(
        "the answered ticket is cut to 32 bits",
        "pull, 2**32 tickets",
        (
            "completion.complete",
            "(request[TICKET] + 1) <<",
            "((request[TICKET] + 1) & 0xFFFFFFFF) <<",
        ),
    ),
    _mutant(
        "the turn is released before the status is read",
        "pull, 1 slot",
        (
            "queue.settle",
            "return consume(q, ticket, status)",
            "status = consume(q, ticket, status)\n"
            "            return status if status == _STALE else judge(flag_of(q, ticket), ticket)",
        ),
    ),
    _mutant(
        "a ticket is consumed by a store, not by compare-and-swap",
        "two waiters",
        ("queue.consume", _CONSUME, _FREE_ANYHOW),
    ),
    _mutant(
        "a waiter that wakes up late recycles the next request's slot",
        "two waiters",
        ("queue.judge", "if sequence == ticket + 1:", "if sequence >= ticket + 1:"),
        ("queue.consume", _CONSUME, _FREE_ANYHOW),
    ),
    _mutant(
        "a later lap's flag is not recognized",
        "two waiters",
        ("queue.judge", "if sequence > ticket + 1:", "if False:"),
    ),
    # --- counted requests ---
    _mutant(
        "a counted request's slot is reused before its answer",
        "counted / counted and pulled",
        ("queue.is_free", _ANSWERED, "return True"),
    ),
    _mutant(
        "answers are counted without release",
        "counted",
        (
            "completion.count_answer",
            "store_release(p.counters, base + COUNTS",
            "store_relaxed(p.counters, base + COUNTS",
        ),
    ),
    _mutant(
        "counts are taken by a store, not by compare-and-swap",
        "counted, shared",
        (
            "counters.take_counts",
            _TAKE,
            "seen = as_word(taken)\n"
            "    store_release_device(q.taken, counter * LINE_WORDS, as_word(now_taken))",
        ),
    ),
    _mutant(
        "answers are loaded before what was taken of them",
        "counted, shared",
        ("counters.load_counts", f"    {_TAKEN}\n", ""),
        ("counters.load_counts", "return taken, answered", f"{_TAKEN}\n    return taken, answered"),
    ),
    # --- reads ---
    _mutant(
        "a retry begins at an unaligned offset",
        "pieces, short reads",
        (
            "arrival.arrive",
            "read_from(p, lease, span_start(reached, record[LEASE_ALIGNMENT]))",
            "read_from(p, lease, reached)",
        ),
    ),
    _mutant(
        "a short read is taken for success",
        "pieces, short reads",
        ("direct_file.judge_read", "if reached >= needed:", "if got > 0:"),
    ),
    _mutant(
        "a short read is taken for the end of the file",
        "pieces, short reads",
        ("direct_file.judge_read", "return RESUME if reached > filled else ENDED", "return ENDED"),
    ),
    _mutant(
        "a read without progress is tried again for ever",
        "end of file",
        ("direct_file.judge_read", "return RESUME if reached > filled else ENDED", "return RESUME"),
    ),
    _mutant(
        "an interrupted read fails its request",
        "pieces, short reads",
        ("arrival.arrive_failed", "if number == _EINTR or number == _EAGAIN:", "if False:"),
    ),
    _mutant(
        "a failed piece completes its request while others are in flight",
        "pieces, a broken one",
        ("completion.complete_if_over", "p.requests[slot, PIECES] == 0 and ", ""),
    ),
    _mutant(
        "a failed request completes while it stands in the ring",
        "pieces, a broken one",
        ("completion.complete_if_over", " and p.requests[slot, QUEUED] == 0", ""),
    ),
    _mutant(
        "a large request is issued to its end before the next one",
        "fairness",
        ("issuing.issue", "most = most_pieces(p)", "most = 1 << 30"),
        (
            "issuing.issue",
            "enqueue(p, slot)",
            "cursor[QUEUE_HEAD] = (cursor[QUEUE_HEAD] - 1) & (p.capacity - 1)\n"
            "            p.queue[cursor[QUEUE_HEAD]] = slot\n"
            "            cursor[QUEUE_COUNT] += 1\n"
            "            request[QUEUED] = 1",
        ),
    ),
    # --- copies and leases ---
    _mutant(
        "the flag is set before the copy is done",
        "copies",
        (
            "copying.copy_piece",
            "p.cursor[COPIES] += 1",
            "p.cursor[COPIES] += 1\n"
            "        p.requests[record[LEASE_SLOT], PIECES] -= 1\n"
            "        complete_if_over(p, record[LEASE_SLOT])",
        ),
        (
            "completion.drop_piece",
            "p.requests[slot, PIECES] -= 1\n    complete_if_over(p, slot)",
            "return",
        ),
    ),
    _mutant(
        "a lease is given back before its copy is done",
        "copies",
        (
            "copying.copy_piece",
            "p.cursor[COPIES] += 1",
            "p.cursor[COPIES] += 1\n        give_back(p.staging, lease)",
        ),
        ("completion.drop_piece", "give_back(p.staging, lease)", "pass"),
    ),
    _mutant(
        "all copies share one event",
        "copies",
        ("copier._start_cuda", "copier.events[lease]", "copier.events[0]"),
        ("copier._look_at_cuda", "copier.events[lease]", "copier.events[0]"),
    ),
    _mutant(
        "one finished copy recycles the whole batch",
        "copies",
        (
            "copying.retire",
            "outcome = look_at_copy(p.copier, lease)",
            "outcome = COPY_DONE if over > 0 else look_at_copy(p.copier, lease)",
        ),
    ),
    _mutant(
        "a borrower takes its bytes from where its own read would have put them",
        "neighbours",
        ("staging.wanted_address", " + ahead", ""),
    ),
    _mutant(
        "a read for several requests is enough when it is for the first",
        "neighbours, end of file",
        (
            "arrival.share",
            "result >= leases[lease, NEEDED]",
            "result >= leases[lease, SKIP] + leases[lease, WANTED]",
        ),
    ),
    _mutant(
        "a failed read fails all that borrow from it",
        "neighbours, faults",
        ("arrival.share", "read_from(p, borrower, 0)", "fail_piece(p, borrower, _READ_FAILED, 5)"),
    ),
    _mutant(
        "requests of two files are joined",
        "neighbours of two files",
        (
            "issuing.is_neighbour",
            "request[SOURCE_BASE] != p.requests[record[LEASE_SLOT], SOURCE_BASE]",
            "False",
        ),
    ),
    _mutant(
        "a piece that goes straight ends behind its request",
        "straight",
        ("direct_file.straight_bytes", "edge) & -alignment", "edge + alignment - 1) & -alignment"),
    ),
    _mutant(
        "a piece goes straight to an address in another place of a block",
        "straight",
        (
            "direct_file.straight_bytes",
            " or (address + edge) & (alignment - 1) != 0",
            "",
        ),
        ("direct_file.straight_bytes", "return -edge if edge > 0 else", "return"),
    ),
    _mutant(
        "a piece that goes straight is taken for done at the first read",
        "straight",
        (
            "arrival.arrive",
            "if verdict == ENOUGH:",
            "if verdict == ENOUGH or record[IS_STRAIGHT] == 1:",
        ),
    ),
    _mutant(
        "a destination is let go while a read goes straight to it",
        "straight, destination let go",
        ("admission.examine", "add_in_flight(p.destinations, destination_base, 1)", "pass"),
        (
            "completion.complete",
            "add_in_flight(p.destinations, request[DESTINATION_BASE], -1)",
            "pass",
        ),
    ),
    _mutant(
        "a copy whose end nobody can see counts as failed",
        "copies that are lost",
        ("copying.end_copy", "elif outcome == COPY_UNCERTAIN:", "elif False:"),
    ),
    # --- the end ---
    _mutant(
        "a closing queue ends without a last look at what was posted",
        "closing",
        ("poller.serve", "p.cursor[IS_SEALED] == 1 and", "state == _CLOSING and"),
    ),
    _mutant(
        "a closing queue is sealed unseen",
        "closing",
        ("poller.poll_once", "done += seal(p)", "p.cursor[IS_SEALED] = 1"),
    ),
    _mutant(
        "an aborted poller leaves reads in flight",
        "abort, reads and copies",
        ("poller.serve", "p.cursor[READS] == 0 and ", ""),
    ),
    _mutant(
        "an aborted poller leaves copies in flight",
        "abort, copies",
        ("poller.serve", " and p.cursor[COPIES] == 0", ""),
    ),
    _mutant(
        "waiters do not look at STATE",
        "abort",
        ("queue.judge_silence", "if state == _RUNNING or state == _CLOSING:", "if True:"),
    ),
    _mutant(
        "a waiter takes the end for an answer without a last look",
        "closing, promised",
        (
            "queue.judge_silence",
            "return _ABORTED if status == _PENDING else status",
            "return _ABORTED",
        ),
    ),
    _mutant(
        "producers do not look at STATE",
        "abort / closing",
        (
            "queue.await_slot",
            "if as_signed(load_acquire(q.control, STATE)) != _RUNNING:",
            "if False:",
        ),
    ),
    # --- capability tables ---
    _mutant(
        "the generation of a handle is not checked",
        "source closed",
        (
            "tables.lookup",
            "as_signed(load_acquire(table, base + HANDLE)) != handle",
            "as_signed(load_acquire(table, base + HANDLE)) & HANDLE_INDEX_MASK != index",
        ),
    ),
    _mutant(
        "a source is closed while requests use it",
        "source closed, reads",
        ("service.Service.close_entry", " or table.in_flight(*handles) > 0", ""),
    ),
    _mutant(
        "a source is closed while a pass may still hold its handle",
        "source closed",
        (
            "service.Service.close_entry",
            "int(load_acquire(self.control, REVISION_SEEN)) < wanted",
            "False",
        ),
    ),
    _mutant(
        "the poller need not see a withdrawn handle",
        "source closed, stale loads",
        (
            "poller.poll_once",
            "load_acquire(p.control, REVISION)",
            "load_relaxed(p.control, REVISION)",
        ),
    ),
    _mutant(
        "the host need not see what the poller did before it saw a withdrawn handle",
        "source closed",
        (
            "poller.poll_once",
            "store_release(p.control, REVISION_SEEN",
            "store_relaxed(p.control, REVISION_SEEN",
        ),
    ),
    # --- the io_uring reader ---
    _mutant(
        "a completion is looked for without acquire",
        "io_uring that is busy",
        (
            "uring._is_empty",
            "load_acquire(reader.cq_tail, 0)",
            "load_relaxed(reader.cq_tail, 0)",
        ),
    ),
    _mutant(
        "completions that wait to be asked for are not asked for",
        "io_uring",
        ("uring._reap", "& SQ_TASKRUN == 0", "& SQ_TASKRUN >= 0"),
    ),
    _mutant(
        "what the kernel did not take is forgotten",
        "io_uring that is busy",
        ("uring._flush", "reader.words[_UNSENT] = unsent - sent", "reader.words[_UNSENT] = 0"),
    ),
    _mutant(
        "a busy kernel ends the queue",
        "io_uring that is busy",
        (
            "uring._flush",
            "return 0 if _comes_to_nothing(sent) else -sent",
            "return -sent",
        ),
    ),
    _mutant(
        "a ring that gives no completions any more does not end the queue",
        "io_uring that fails",
        ("uring._note_failure", "reader.words[_FAILURE] = -result", "pass"),
    ),
    # --- the threads reader ---
    _mutant(
        "a job is read after it was claimed",
        "rings",
        (
            "threads._work_once",
            "    if compare_exchange(reader.shared, _JOB_HEAD, head, head + 1) != head:\n"
            "        return True\n",
            "",
        ),
        (
            "threads._work_once",
            "    lease = load_relaxed(jobs, base + _LEASE)\n",
            "    if compare_exchange(reader.shared, _JOB_HEAD, head, head + 1) != head:\n"
            "        return True\n"
            "    lease = load_relaxed(jobs, base + _LEASE)\n",
        ),
    ),
    _mutant(
        "a job is claimed without looking whether it is there by acquire",
        "rings, stale loads",
        (
            "threads._work_once",
            "load_acquire(reader.shared, _JOB_TAIL)",
            "load_relaxed(reader.shared, _JOB_TAIL)",
        ),
    ),
    _mutant(
        "a result is published before it is written",
        "rings",
        ("threads._work_once", "    reader.results[base + _RESULT] = result\n", ""),
        (
            "threads._work_once",
            "store_release(reader.results, base + _SEQUENCE, position + 1)",
            "store_release(reader.results, base + _SEQUENCE, position + 1)\n"
            "    reader.results[base + _RESULT] = result",
        ),
    ),
    _mutant(
        "a worker goes to sleep without a last look for jobs",
        "rings, one worker",
        (
            "threads._sleep_until_rung",
            "if head >= load_acquire(reader.shared, _JOB_TAIL) and",
            "if True and",
        ),
    ),
    _mutant(
        "a stop does not wake who sleeps",
        "rings",
        ("threads.WorkerThreads.stop", "_ring(self.reader, _EVERYBODY)\n", "pass\n"),
    ),
)
"""All of them; each name says what is wrong."""
