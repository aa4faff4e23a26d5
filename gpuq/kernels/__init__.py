"""What runs inside a kernel."""

from gpuq.compiling import SIMULATED
from gpuq.kernels.queue import (
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

if not SIMULATED:
    import gpuq.kernels.lowering  # noqa: F401

__all__ = [
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
