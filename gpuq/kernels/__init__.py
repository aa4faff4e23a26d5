"""What runs inside a kernel."""

import importlib

from gpuq.compiling import when_cuda
from gpuq.kernels.binding import bind
from gpuq.kernels.cooperation import block_barrier, block_rank, block_size
from gpuq.kernels.counters import (
    poll_counter,
    post_counted,
    post_counted_at,
    wait_counter,
    wait_counter_for,
)
from gpuq.kernels.gathering import gather, post_gather, wait_gather
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
from gpuq.kernels.scopes import (
    post_block,
    post_block_at,
    pull_block,
    pull_block_at,
    pull_warp,
    pull_warp_at,
    wait_block,
    wait_counter_block,
    wait_warp,
)
from gpuq.kernels.sharing import share
from gpuq.kernels.stream import stream_close, stream_next, stream_open, stream_open_from

when_cuda(lambda: importlib.import_module("gpuq.kernels.lowering"))

__all__ = [
    "bind",
    "block_barrier",
    "block_rank",
    "block_size",
    "errno_of",
    "gather",
    "poll",
    "poll_counter",
    "post",
    "post_at",
    "post_block",
    "post_block_at",
    "post_counted",
    "post_counted_at",
    "post_gather",
    "pull",
    "pull_at",
    "pull_block",
    "pull_block_at",
    "pull_warp",
    "pull_warp_at",
    "share",
    "stream_close",
    "stream_next",
    "stream_open",
    "stream_open_from",
    "try_post",
    "try_post_at",
    "wait",
    "wait_block",
    "wait_counter",
    "wait_counter_block",
    "wait_counter_for",
    "wait_for",
    "wait_gather",
    "wait_warp",
]
