"""Who runs when: threads that do one step at a time, and a watchdog behind every wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, TypeVar

from gpuq.errors import GpuqError

Result = TypeVar("Result")

_GRACE_SECONDS = 30.0


class StuckError(GpuqError):
    """A step did not end although the watchdog had opened every gate."""


class Watchdog:
    """Opens every gate when the time is over, so that no thread waits for ever.

    Parameters
    ----------
    seconds : float
        From the start of the first wait.
    """

    def __init__(self, seconds: float) -> None:
        self.has_fired = False
        self._seconds = seconds
        self._releases: list[Callable[[str], None]] = []
        self._timer = threading.Timer(seconds, self._fire)
        self._timer.daemon = True
        self._deadline = 0.0
        self._is_over = False

    def __enter__(self) -> Watchdog:
        self._deadline = time.monotonic() + self._seconds + _GRACE_SECONDS
        self._timer.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Stop the clock and let every thread go that still waits."""
        self._timer.cancel()
        self._is_over = True
        self._release("schedule")

    def releases(self, release: Callable[[str], None]) -> None:
        """Call this, with the name of the thread to be noted, when the time is over."""
        self._releases.append(release)

    def wait(self, event: threading.Event) -> None:
        """Wait for an event; once the watchdog has fired there is nothing to wait for."""
        self._releases.append(lambda _thread: event.set())
        if self.has_fired:
            event.set()
        if not event.wait(self._left()):
            raise StuckError("a thread did not come to its stop")

    def result(self, future: Future[Result]) -> Result:
        """Wait for the end of a step and return what it returned."""
        try:
            return future.result(self._left())
        except TimeoutError:
            raise StuckError("a step did not end") from None

    def check(self) -> None:
        """Raise `StuckError` if a loop goes on though the gates are long open, or all is over."""
        if self._is_over or self._left() == 0:
            raise StuckError("the poller makes no progress")

    def _left(self) -> float:
        return max(0.0, self._deadline - time.monotonic())

    def _fire(self) -> None:
        self.has_fired = True
        self._release("watchdog")

    def _release(self, thread: str) -> None:
        for release in list(self._releases):
            release(thread)


class Actor:
    """A thread of its own that does the steps it is given, one after another.

    Parameters
    ----------
    name : str
        Of the thread, in the trace.
    watchdog : Watchdog
        Behind every wait for it.
    """

    def __init__(self, name: str, watchdog: Watchdog) -> None:
        self._watchdog = watchdog
        self._executor = ThreadPoolExecutor(1, initializer=_name_thread, initargs=(name,))

    def __enter__(self) -> Actor:
        return self

    def __exit__(self, *_error: Any) -> None:
        """Let the thread end; the watchdog has released what it waited for."""
        self._executor.shutdown()

    def begin(self, step: Callable[..., Result], *arguments: Any) -> Future[Result]:
        """Start a step and return at once."""
        return self._executor.submit(step, *arguments)

    def do(self, step: Callable[..., Result], *arguments: Any) -> Result:
        """Do a step and return what it returned."""
        return self._watchdog.result(self.begin(step, *arguments))


def _name_thread(name: str) -> None:
    threading.current_thread().name = name


class Stop:
    """A place where a thread stops until it is told to go on.

    Parameters
    ----------
    watchdog : Watchdog
        Lets it go on, too.
    """

    def __init__(self, watchdog: Watchdog) -> None:
        self.reached = threading.Event()
        self._may_go_on = threading.Event()
        watchdog.releases(lambda _thread: self._may_go_on.set())

    def stop(self) -> None:
        """Say that the place is reached, and wait there."""
        self.reached.set()
        self._may_go_on.wait()

    def go_on(self) -> None:
        """Let the thread go on."""
        self._may_go_on.set()
