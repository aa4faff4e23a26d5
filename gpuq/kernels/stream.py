"""A stream for kernels: a block walks rows of a file tile by tile, the next tiles in flight.

The author opens a stream and takes tile after tile; posting, waiting and the reuse of tiles
happen here. A tile is handed out until the next `stream_next` of the same worker, which gives it
back and asks for a later one in its place: with N tiles in flight there are N + 1 in a worker's
ring, and N of them are on their way while one is worked on.

All functions are block forms: every thread of the block must call them, in the same order (see
`gpuq.kernels.scopes`). On the CPU a block is one thread. A worker is a block; each has a ring of
its own, and only that block's rank 0 touches its words.

A worker with tiles on their way never spins for a slot: the next one may be its own, once the
others have gone round the queue. It goes on with fewer tiles in flight, and asks again when it
has taken its oldest.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from gpuq.compiling import protocol, protocol_of_arrays
from gpuq.kernels.cooperation import block_barrier, block_broadcast, block_rank
from gpuq.kernels.queue import await_slot, claim, publish, wait
from gpuq.layout import FLAG_STATUS_MASK, LINE_WORDS, NO_TICKET, Status
from gpuq.ordering import as_signed

# Words of a worker; its own, so they need no order.
_SOURCE = 0  # handle of the file that it walks
_NEXT = 1  # first row that no tile was asked for yet
_LAST = 2  # one past the last row of the walk
_ASKED = 3  # tiles asked for since the stream was opened
_TAKEN = 4  # of these, handed out
_TAKING = 5  # first row of the next tile to hand out
_ROW = 6  # first row of the tile that is handed out
STREAM_WORDS = LINE_WORDS

_OK = int(Status.OK)
_BAD_RANGE = int(Status.BAD_RANGE)
_OUT_OF_BOUNDS = int(Status.OUT_OF_BOUNDS)
_BAD_OPTIONS = int(Status.BAD_OPTIONS)
_STATUS_BITS = FLAG_STATUS_MASK.bit_length()
_ROWS_BITS = 32
_ROWS_MASK = (1 << _ROWS_BITS) - 1
MOST_TILE_ROWS = _ROWS_MASK
MOST_TILES = 1 << 22


class Stream(NamedTuple):
    """What a kernel is handed of a stream, made by ``loader.stream(...)``.

    Attributes
    ----------
    source, destination : int
        Handles.
    start : int
        Byte of the file where row 0 begins.
    rows : int
        Rows in the stream's range.
    row_bytes : int
    tiles : array, shape (workers, tiles of a worker, rows of a tile, ...)
        Where the bytes come.
    tickets : array of int64, shape (workers, tiles of a worker)
    words : array of int64, shape (workers, STREAM_WORDS)
    """

    source: int
    destination: int
    start: int
    rows: int
    row_bytes: int
    tiles: Any
    tickets: Any
    words: Any


@protocol
def has_worker(stream: Any, worker: Any) -> Any:
    """Whether the stream has a ring for this worker."""
    return 0 <= worker < stream.words.shape[0]


@protocol
def ask_for_tile(q: Any, stream: Any, worker: Any, may_block: Any) -> Any:
    """Post the next tile of a worker; spin for a slot only if `may_block`. False: no slot."""
    words = stream.words
    ring = stream.tickets.shape[1]
    tile = words[worker, _ASKED] % ring
    first = words[worker, _NEXT]
    last = min(first + stream.tiles.shape[2], words[worker, _LAST])
    if first < 0 or first > stream.rows or last > stream.rows:
        # What lies there in the file is no row of this stream: another array, or a header.
        ticket = -_OUT_OF_BOUNDS
    elif may_block:
        ticket = await_slot(q, 0)
    else:
        ticket = claim(q)
    if ticket >= 0:
        offset = (worker * ring + tile) * stream.tiles.shape[2] * stream.row_bytes
        start = stream.start + first * stream.row_bytes
        end = stream.start + last * stream.row_bytes
        source = words[worker, _SOURCE]
        publish(q, ticket, source, stream.destination, offset, start, end, worker)
    elif ticket != -_OUT_OF_BOUNDS and not may_block:
        return False
    stream.tickets[worker, tile] = ticket
    words[worker, _NEXT] = last
    words[worker, _ASKED] += 1
    return True


@protocol
def ask_for_tiles(q: Any, stream: Any, worker: Any) -> None:
    """Post tiles of a worker until all but one are on their way, or the range or slots end."""
    words = stream.words
    while (
        words[worker, _ASKED] - words[worker, _TAKEN] < stream.tickets.shape[1] - 1
        and words[worker, _NEXT] < words[worker, _LAST]
    ):
        if not ask_for_tile(q, stream, worker, False):
            break


@protocol
def drain_tiles(q: Any, stream: Any, worker: Any) -> None:
    """Wait for all tiles of a worker that are on their way."""
    for tile in range(stream.tickets.shape[1]):
        wait(q, stream.tickets[worker, tile])
        stream.tickets[worker, tile] = NO_TICKET


@protocol
def stream_open_from(q: Any, stream: Any, worker: Any, source: Any, first: Any, last: Any) -> None:
    """Begin to walk rows of another source than the stream's; see `stream_open`.

    Parameters
    ----------
    source : int
        Handle of a file whose rows begin and end where the stream's do.
    """
    if block_rank() == 0 and has_worker(stream, as_signed(worker)):
        drain_tiles(q, stream, worker)
        words = stream.words
        words[worker, _SOURCE] = as_signed(source)
        words[worker, _NEXT] = as_signed(first)
        words[worker, _LAST] = as_signed(last)
        words[worker, _ASKED] = 0
        words[worker, _TAKEN] = 0
        words[worker, _TAKING] = as_signed(first)
        ask_for_tiles(q, stream, worker)
    block_barrier()


@protocol
def stream_open(q: Any, stream: Any, worker: Any, first: Any, last: Any) -> None:
    """Begin to walk rows ``[first, last)`` of the stream, and ask for the first tiles.

    Parameters
    ----------
    q : Queue
    stream : Stream
        From ``loader.stream(...)``.
    worker : int
        Number of the calling block, less than the stream's workers; its ring of tiles.
    first, last : int
        Rows, counted from the stream's start; see `gpuq.share`. A tile with a row that the
        stream has not is ``OUT_OF_BOUNDS``, and nothing is read for it. What another walk of
        this worker left on its way is waited for first.
    """
    stream_open_from(q, stream, worker, stream.source, first, last)


@protocol_of_arrays
def stream_next(q: Any, stream: Any, worker: Any) -> Any:
    """Give the last tile back, and wait for the next.

    Returns
    -------
    status : int
        A `Status`. On anything but ``OK`` the tile is empty: call again to go on behind it, or
        `stream_close` to leave the rest.
    row : int
        Number of the tile's first row, counted from the stream's start.
    tile : array, shape (rows, ...)
        The next rows, fewer in the last tile; none at the end. They are overwritten after the
        next call.
    """
    # All threads of the block are done with the last tile: it may be overwritten.
    block_barrier()
    answer = 0
    if block_rank() == 0:
        answer = take_tile(q, stream, as_signed(worker))
    answer = block_broadcast(answer)
    status = answer & FLAG_STATUS_MASK
    rows = (answer >> _STATUS_BITS) & _ROWS_MASK
    position = answer >> (_STATUS_BITS + _ROWS_BITS)
    ring = stream.tickets.shape[1]
    row = stream.words[position // ring, _ROW]
    return status, row, stream.tiles[position // ring, position % ring, :rows]


@protocol
def pack_tile(position: Any, rows: Any) -> Any:
    """Put the number of a tile among those of all workers and its rows above a status."""
    return (position << _ROWS_BITS | rows) << _STATUS_BITS


@protocol
def take_tile(q: Any, stream: Any, worker: Any) -> Any:
    """Wait for the next tile and keep the ring full; tile, rows and status in one word."""
    if not has_worker(stream, worker):
        return _BAD_OPTIONS
    words = stream.words
    ring = stream.tickets.shape[1]
    first = words[worker, _TAKING]
    words[worker, _ROW] = first
    none = pack_tile(worker * ring, 0)
    if words[worker, _NEXT] > words[worker, _LAST]:
        words[worker, _NEXT] = words[worker, _LAST]
        return none | _BAD_RANGE
    if words[worker, _ASKED] == words[worker, _TAKEN]:
        if words[worker, _NEXT] == words[worker, _LAST]:
            return none
        ask_for_tile(q, stream, worker, True)
    tile = words[worker, _TAKEN] % ring
    status = wait(q, stream.tickets[worker, tile])
    stream.tickets[worker, tile] = NO_TICKET
    words[worker, _TAKEN] += 1
    ask_for_tiles(q, stream, worker)
    rows = min(stream.tiles.shape[2], words[worker, _LAST] - first)
    words[worker, _TAKING] = first + rows
    return pack_tile(worker * ring + tile, rows if status == _OK else 0) | status


@protocol
def stream_close(q: Any, stream: Any, worker: Any) -> None:
    """Leave a walk before its end: wait for the tiles that are on their way.

    After the end of a range it does nothing. Until it, or the next `stream_open`, returns, the
    worker's tiles may still be written, and their answers hold slots of the queue.
    """
    if block_rank() == 0 and has_worker(stream, as_signed(worker)):
        drain_tiles(q, stream, worker)
        stream.words[worker, _NEXT] = stream.words[worker, _LAST]
        stream.words[worker, _TAKEN] = stream.words[worker, _ASKED]
    block_barrier()
