"""A model of the pool of NVIDIA DALI issue 6623: one event speaks for all batches of copies.

The rules, as ``dali/operators/reader/gds_mem.cc`` has them; the code here is gpuq's own.

* A buffer is ready, or lent to a reader, or *unscheduled* (filled, its copy not yet submitted),
  or *scheduled* (its copy submitted). The pool grows by doubling, up to its size.
* When more than `batch` buffers are unscheduled, their copies are submitted. First the event is
  asked whether the copies before are over, and if so their buffers become ready; then the new
  ones join the scheduled, and the one event is recorded anew.
* A reader for whom no buffer is ready lets go of the lock, sleeps until the event is complete,
  takes the lock again, and makes ready *all that is scheduled then*.

The last rule is the bug. The sleep ends for the record that was the last when it began. If a
batch is submitted between its end and the lock, the list holds that batch too. With `rechecks`,
the waiter asks the event again under the lock, and leaves the list alone where it is not complete.

Which of the ready buffers a reader gets is not said there: it is the first in a hash set of
addresses, which in libstdc++ is as a rule the one that was put in last. So it is here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

from gpuq.race.board import Board, Holder
from gpuq.race.stream import GatedStream, StreamEvent


class SharedEventPool:
    """Staging buffers whose copies are submitted in batches, with one event for all of them.

    Parameters
    ----------
    stream : GatedStream
    board : Board
    buffers : int
        At most.
    batch : int
        Copies are submitted when more than so many wait.
    rechecks : bool
        Whether a waiter looks at the event again once it has the lock.
    wait_hook : function
        Called where a waiter's sleep is over and the lock not yet taken again.

    Attributes
    ----------
    ready, scheduled : list of int
        Buffers; the last one that became ready is lent first.
    wait_hook_calls : int
    """

    def __init__(
        self,
        stream: GatedStream,
        board: Board,
        *,
        buffers: int,
        batch: int,
        rechecks: bool,
        wait_hook: Callable[[], None],
    ) -> None:
        self.ready: list[int] = []
        self.scheduled: list[int] = []
        self.wait_hook_calls = 0
        self._unscheduled: list[tuple[int, int]] = []  # buffer, sample
        self._lent: set[int] = set()
        self._allocated = 0
        self._buffers = buffers
        self._batch = batch
        self._rechecks = rechecks
        self._wait_hook = wait_hook
        self._stream = stream
        self._board = board
        self._event = StreamEvent(stream)
        self._lock = threading.Lock()

    def borrow(self, sample: int) -> int:
        """Return a buffer to be filled with a sample; wait for one where none is ready."""
        with self._lock:
            while not self.ready:
                if self._allocated < self._buffers:
                    self._grow()
                else:
                    self._board.note("ask", sample=sample)
                    self._wait()
            buffer = self.ready.pop()
            self._lent.add(buffer)
            self._board.note("lease", buffer, sample)
            return buffer

    def copy_out(self, buffer: int, sample: int) -> None:
        """Let a filled buffer wait for its batch; submit the batch if that makes it full."""
        with self._lock:
            self._lent.remove(buffer)
            self._unscheduled.append((buffer, sample))
            self._board.note("queue_copy", buffer, sample)
            if len(self._unscheduled) > self._batch:
                self._submit()

    def flush(self) -> None:
        """Submit what waits for a batch."""
        with self._lock:
            self._submit()

    def holders(self) -> Iterator[Holder]:
        """Say of each buffer who holds it, and whether rightly."""
        pending = self._stream.pending_buffers()
        filled = {buffer for buffer, _ in self._unscheduled}
        for buffer in range(self._buffers):
            if buffer in self._lent:
                yield Holder.FILLED_TOO_EARLY if buffer in pending else Holder.READER
            elif buffer in filled:
                yield Holder.FILLED
            elif buffer in self.scheduled:
                yield Holder.COPYING if buffer in pending else Holder.COPIED
            else:
                yield Holder.FREE_TOO_EARLY if buffer in pending else Holder.FREE

    def _grow(self) -> None:
        total = min(max(2 * self._allocated, 2), self._buffers)
        self.ready.extend(range(self._allocated, total))
        self._allocated = total

    def _wait(self) -> None:
        if not self.scheduled and self._unscheduled:
            self._submit()
        self._lock.release()
        try:
            self._event.synchronize()
            self.wait_hook_calls += 1
            self._wait_hook()
        finally:
            self._lock.acquire()
        self._board.note("wake")
        if self._rechecks:
            self._recycle_if_complete()
        else:
            self._recycle()

    def _submit(self) -> None:
        layout = self._stream.layout
        size = layout.block_bytes
        for buffer, sample in self._unscheduled:
            self._stream.copy(
                layout.destination + sample * size, layout.staging + buffer * size, size
            )
        self._recycle_if_complete()
        self.scheduled += [buffer for buffer, _ in self._unscheduled]
        self._unscheduled.clear()
        self._event.record()
        self._board.note("record_event")

    def _recycle_if_complete(self) -> None:
        if self._event.is_complete():
            self._recycle()

    def _recycle(self) -> None:
        pending = self._stream.pending_buffers()
        for buffer in self.scheduled:
            self._board.note("free_too_early" if buffer in pending else "free", buffer)
        self.ready += self.scheduled
        self.scheduled.clear()
