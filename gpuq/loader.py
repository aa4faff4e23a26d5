"""The `Loader`: what users hold. It composes a queue for kernels with the service behind it."""

from __future__ import annotations

import weakref
from types import TracebackType
from typing import Any

from gpuq.config import LoaderConfig
from gpuq.errors import ConfigError
from gpuq.handles import Destination, Source
from gpuq.host.choice import keep_forever
from gpuq.host.service import Service
from gpuq.host.statistics import Statistics
from gpuq.host.taken import Trace
from gpuq.host_side import HostSide
from gpuq.kernel_side import KernelSide
from gpuq.layout import Queue, State
from gpuq.targets import choose_device

_ABORTED_SECONDS = 10.0


class Loader(KernelSide, HostSide):
    """A queue that kernels post to, and the poller that serves it.

    Parameters
    ----------
    config : LoaderConfig, optional
        All settings at once.
    **settings
        Single settings instead; see `LoaderConfig`. What is not given comes from the environment
        (GPUQ_TARGET, GPUQ_READER, GPUQ_DIRECT) and then from the defaults.

    Attributes
    ----------
    queue : Queue
        What kernels are handed.
    config : LoaderConfig
    target, target_reason : str
        Where kernels run, and why there.

    Raises
    ------
    ConfigError, TargetUnavailableError, ReaderUnavailableError
        Nothing was started.

    Examples
    --------
    >>> with gpuq.Loader() as loader:                       # doctest: +SKIP
    ...     source = loader.open("weights.bin")
    ...     tile = loader.register(np.empty(4096, np.uint8))
    ...     kernel(loader.queue, source.handle, tile.handle)
    """

    def __init__(self, config: LoaderConfig | None = None, **settings: Any) -> None:
        if config is not None and settings:
            raise ConfigError("give either a LoaderConfig or single settings, not both")
        super().__init__()
        self.config = config or LoaderConfig.from_environment(**settings)
        device, self.target_reason = choose_device(self.config.target)
        self.target = device.name
        self._service = Service(self.config, device)
        self._service.start()
        self.queue: Queue = self._service.queue
        # Runs at interpreter exit too, while the poller's daemon thread is still served.
        self._finalizer = weakref.finalize(
            self, _finish, self._service, self._sources, self._destinations
        )

    @property
    def state(self) -> State:
        """Where the queue is in its life."""
        return self._service.state

    def statistics(self) -> Statistics:
        """Return a snapshot of what was done; works on a closed loader too."""
        return self._service.statistics()

    def trace(self) -> Trace:
        """Take the records of all requests that were answered since the last call.

        Works on a closed loader too. Call it often enough: the loader keeps as many records as
        its setting `trace` says, and what finds no room is counted and dropped.

        Raises
        ------
        ConfigError
            The loader keeps no trace.
        """
        if not self.config.trace:
            raise ConfigError(
                "this loader keeps no trace; say how many records it is to keep, as in "
                "Loader(trace=100_000)"
            )
        with self._service.lock:
            return self._take_trace()

    def check(self) -> None:
        """Raise if the loader cannot be used any more.

        Raises
        ------
        PollerDiedError, ClosedError, ForkedError
        """
        self._service.check()

    def abort(self) -> None:
        """Release every waiting kernel at once, with ``Status.ABORTED``.

        Returns at once; safe from a signal handler and more than once. `close` gives the memory
        back. Until then a read that was under way may still bring bytes to its destination.
        """
        self._service.abort()

    def close(self) -> None:
        """Serve what was posted, stop the poller, and give everything back.

        Safe from a signal handler; a second call does nothing. After `abort` it only waits for
        reads under way.

        Raises
        ------
        PollerDiedError
            The poller had ended by an error that no call has raised yet. All was given back.
        """
        try:
            self._service.close()
        finally:
            if self._reads is not None:
                self._reads.stop(_ABORTED_SECONDS)
            _forget(self._service, self._sources, self._destinations)

    def __enter__(self) -> Loader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is not None:
            self.abort()
            try:
                self.close()
            except Exception as error:
                value.add_note(f"and the loader, while it was closed: {error}")  # type: ignore[union-attr]
            return
        self.close()

    def __repr__(self) -> str:
        return (
            f"<gpuq.Loader {self.state.name.lower()}, target {self.target}, "
            f"reader {self._service.choice.name}, {self.config.slots} slots, "
            f"{self.config.staging_buffers} x {self.config.staging_bytes} bytes of staging>"
        )


def _forget(
    service: Service, sources: dict[int, Source], destinations: dict[int, Destination]
) -> None:
    """Close files and let arrays go once no poller can use them."""
    if service.is_dirty:
        # A copy may still be under way to one of these arrays.
        keep_forever(list(destinations.values()))
    if service.is_serving:
        return
    while sources:
        sources.popitem()[1].close()
    while destinations:
        destinations.popitem()[1].unregister()


def _finish(
    service: Service, sources: dict[int, Source], destinations: dict[int, Destination]
) -> None:
    service.finish()
    _forget(service, sources, destinations)
