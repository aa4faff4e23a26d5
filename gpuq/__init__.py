"""gpuq: a Numba kernel, while it runs, pulls bytes out of files.

``import gpuq`` is all that is needed: `Loader` on the host, `post`, `wait` and their kin in
kernels, `Status` in both.
"""

from gpuq.config import LoaderConfig
from gpuq.errors import (
    ClosedError,
    ConfigError,
    DestinationError,
    DirectUnavailableError,
    ForkedError,
    FormatError,
    GpuqError,
    PollerDiedError,
    ReaderUnavailableError,
    SourceError,
    TargetUnavailableError,
)
from gpuq.host.service import Statistics
from gpuq.kernels import (
    errno_of,
    poll,
    post,
    post_at,
    pull,
    pull_at,
    try_post,
    try_post_at,
    wait,
    wait_for,
)
from gpuq.layout import Queue, State, Status
from gpuq.loader import Destination, Explanation, Loader, Source
from gpuq.version import __version__

__all__ = [
    "ClosedError",
    "ConfigError",
    "Destination",
    "DestinationError",
    "DirectUnavailableError",
    "Explanation",
    "ForkedError",
    "FormatError",
    "GpuqError",
    "Loader",
    "LoaderConfig",
    "PollerDiedError",
    "Queue",
    "ReaderUnavailableError",
    "Source",
    "SourceError",
    "State",
    "Statistics",
    "Status",
    "TargetUnavailableError",
    "__version__",
    "errno_of",
    "poll",
    "post",
    "post_at",
    "pull",
    "pull_at",
    "try_post",
    "try_post_at",
    "wait",
    "wait_for",
]
