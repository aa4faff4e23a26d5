"""A stream for kernels: a block walks a range of a file tile by tile, the next tiles in flight.

The author opens a stream and takes tile after tile; posting, waiting and the reuse of tiles
happen here. A tile is handed out until the next `stream_next` of the same worker, which gives it
back and asks for a later one in its place: with N tiles in a worker's ring, N - 1 are on their
way while one is worked on.

All functions are block forms: every thread of the block must call them, in the same order (see
`gpuq.kernels.scopes`). On the CPU a block is one thread. A worker is a block; each has a ring of
its own, and only that block's rank 0 touches its words.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from gpuq.compiling import protocol
from gpuq.kernels.cooperation import block_barrier, block_broadcast, block_rank
from gpuq.kernels.queue import post_at, wait
from gpuq.layout import FLAG_STATUS_MASK, LINE_WORDS, NO_TICKET, Status

# Words of a worker; its own, so they need no order.
_NEXT = 0  # first byte that no tile was asked for yet
_END = 1
_ASKED = 2  # tiles asked for since the stream was opened
_TAKEN = 3  # of these, handed out
_TAKING = 4  # first byte of the next tile to hand out
STREAM_WORDS = LINE_WORDS

_OK = int(Status.OK)
_STATUS_BITS = FLAG_STATUS_MASK.bit_length()
_BYTES_BITS = 32
_BYTES_MASK = (1 << _BYTES_BITS) - 1
MOST_TILE_BYTES = _BYTES_MASK


class Stream(NamedTuple):
    """What a kernel is handed of a stream, made by ``loader.stream(...)``.

    Attributes
    ----------
    source, destination : int
        Handles.
    tiles : array of uint8, shape (workers, tiles of a worker, tile_bytes)
        Where the bytes come; ``stream.tiles[worker, tile]``.
    tickets : array of int64, shape (workers, tiles of a worker)
    words : array of int64, shape (workers, STREAM_WORDS)
    tile_bytes : int
    """

    source: int
    destination: int
    tiles: Any
    tickets: Any
    words: Any
    tile_bytes: int


@protocol
def ask_for_tile(q: Any, stream: Any, worker: Any) -> None:
    """Post the next tile of a worker, if the range has one more."""
    words = stream.words
    start = words[worker, _NEXT]
    ring = stream.tickets.shape[1]
    tile = words[worker, _ASKED] % ring
    if start >= words[worker, _END]:
        stream.tickets[worker, tile] = NO_TICKET
        return
    end = min(start + stream.tile_bytes, words[worker, _END])
    offset = (worker * ring + tile) * stream.tile_bytes
    ticket = post_at(q, stream.source, stream.destination, offset, start, end, worker)
    stream.tickets[worker, tile] = ticket
    words[worker, _NEXT] = end
    words[worker, _ASKED] += 1


@protocol
def drain_tiles(q: Any, stream: Any, worker: Any) -> None:
    """Wait for all tiles of a worker that are on their way."""
    ring = stream.tickets.shape[1]
    for tile in range(ring):
        wait(q, stream.tickets[worker, tile])
        stream.tickets[worker, tile] = NO_TICKET


@protocol
def stream_open(q: Any, stream: Any, worker: Any, start: Any, end: Any) -> None:
    """Begin to walk ``[start, end)`` of the stream's source, and ask for the first tiles.

    Parameters
    ----------
    q : Queue
    stream : Stream
        ``loader.stream(...).handle``.
    worker : int
        Number of the calling block, less than the stream's workers; its ring of tiles.
    start, end : int
        Range in bytes. What another walk of this worker left on its way is waited for first.
    """
    if block_rank() == 0:
        drain_tiles(q, stream, worker)
        words = stream.words
        words[worker, _NEXT] = start
        words[worker, _END] = end
        words[worker, _ASKED] = 0
        words[worker, _TAKEN] = 0
        words[worker, _TAKING] = start
        for _ in range(stream.tickets.shape[1] - 1):
            ask_for_tile(q, stream, worker)
    block_barrier()


@protocol
def stream_next(q: Any, stream: Any, worker: Any) -> Any:
    """Give the last tile back, and wait for the next.

    Returns
    -------
    status : int
        A `Status`. On anything but ``OK`` the tile has no bytes; `stream_close` and go on.
    tile : int
        Which tile of the worker's ring: ``stream.tiles[worker, tile, :nbytes]``.
    nbytes : int
        Bytes in it; 0 at the end of the range.
    """
    # All threads of the block are done with the last tile: it may be overwritten.
    block_barrier()
    answer = 0
    if block_rank() == 0:
        answer = take_tile(q, stream, worker)
    answer = block_broadcast(answer)
    nbytes = (answer >> _STATUS_BITS) & _BYTES_MASK
    return answer & FLAG_STATUS_MASK, answer >> (_STATUS_BITS + _BYTES_BITS), nbytes


@protocol
def take_tile(q: Any, stream: Any, worker: Any) -> Any:
    """Ask for a tile in place of the last one and wait for the next; all three results packed."""
    words = stream.words
    if words[worker, _ASKED] - words[worker, _TAKEN] < stream.tickets.shape[1]:
        ask_for_tile(q, stream, worker)
    start = words[worker, _TAKING]
    if words[worker, _TAKEN] == words[worker, _ASKED]:
        return 0
    tile = words[worker, _TAKEN] % stream.tickets.shape[1]
    status = wait(q, stream.tickets[worker, tile])
    stream.tickets[worker, tile] = NO_TICKET
    words[worker, _TAKEN] += 1
    nbytes = min(stream.tile_bytes, words[worker, _END] - start)
    words[worker, _TAKING] = start + nbytes
    if status != _OK:
        nbytes = 0
    return ((tile << _BYTES_BITS) | nbytes) << _STATUS_BITS | status


@protocol
def stream_close(q: Any, stream: Any, worker: Any) -> None:
    """Leave a walk before its end: wait for the tiles that are on their way.

    After the end of a range it does nothing. Until it, or the next `stream_open`, returns, the
    worker's tiles may still be written.
    """
    if block_rank() == 0:
        drain_tiles(q, stream, worker)
        stream.words[worker, _END] = stream.words[worker, _NEXT]
        stream.words[worker, _TAKEN] = stream.words[worker, _ASKED]
    block_barrier()
