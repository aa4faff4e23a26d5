"""How a pull is shown: a table for people, a dictionary for programs."""

from __future__ import annotations

import os
from typing import Any

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from gpuq.handles import Explanation
from gpuq.pull_files import Pull, PulledArray

_UNBOUNDED_COLUMNS = 100_000
_STORY_COLUMNS = 88
_NAMED_ARRAYS = 5
_PLACES = {
    "cpu": "compiled by Numba for the CPU, no GPU needed",
    "simulator": "run by Numba's simulator of CUDA",
    "cuda": "compiled by Numba for the GPU",
}


def printable(text: str) -> str:
    """Return text on one line without control characters; names come from files."""
    return "".join(
        character
        if character.isprintable()
        else character.encode("unicode_escape", "backslashreplace").decode("ascii")
        for character in text
    )


def open_console() -> Console:
    """Return a console on standard output; it folds lines only for a terminal or COLUMNS."""
    console = Console(markup=False, highlight=False, emoji=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _UNBOUNDED_COLUMNS
    return console


def show_pull(console: Console, path: str, format_name: str, pull: Pull) -> None:
    """Print the arrays of one file as a table, then how they were pulled."""
    count = len(pull.arrays)
    title = f"{printable(path)}: {format_name}, {count} array{'s' * (count != 1)}"
    print_trimmed(console, Text(title, style="bold", overflow="fold"))
    print_trimmed(console, _array_table(pull.arrays))
    print_trimmed(console, Text())
    print_trimmed(console, _summary_table(pull))
    print_trimmed(console, Text())


def tell_story(console: Console, pull: Pull) -> None:
    """Print in plain words what a pull without faults did."""
    source = pull.sources[0]
    if source.direct:
        mode = (
            "The reads were direct (O_DIRECT): the bytes went from the storage into gpuq's own "
            "buffers, not through the page cache of the system. Such reads bring whole blocks, "
            "and none of these arrays begins or ends where a block does; so a block was read "
            "and just the bytes asked for were copied out of it."
        )
    else:
        mode = (
            "The reads were not direct: they went through the page cache of the system, because "
            f"{source.reason}."
        )
    paragraphs = (
        f"The kernel, {_PLACES[source.target]}, was launched once. While it ran it asked for "
        f"bytes of the file: {pull.requests:,} requests, up to "
        f"{min(pull.requests, pull.window):,} of them waiting at once, each saying which array, "
        "from which byte and to which byte.",
        "A thread beside the kernel took the requests from a queue in memory. It made "
        f"{pull.reads:,} reads with {source.reader} and put the bytes into the arrays. The "
        "kernel saw each answer while it was still running.",
        mode,
        f"Then each of the {pull.nbytes:,} bytes was compared with an ordinary read of the same "
        "file. All are right.",
    )
    console.width = min(console.width, _STORY_COLUMNS)
    print_trimmed(console, Text("What happened\n", style="bold"))
    for paragraph in paragraphs:
        print_trimmed(console, Padding(Text(paragraph), (0, 0, 1, 2)))
    print_trimmed(console, Text("The file was removed. With one of your own:  gpuq pull FILE"))


def describe_pull(path: str, format_name: str, pull: Pull) -> dict[str, Any]:
    """Return the same as `show_pull` prints, for JSON."""
    first = pull.sources[0] if pull.sources else None
    return {
        "path": path,
        "ok": pull.ok,
        "error": None,
        "format": format_name,
        "bytes": pull.nbytes,
        "seconds": pull.seconds,
        "gb_per_s": pull.gb_per_s,
        "requests": pull.requests,
        "reads": pull.reads,
        "target": first and first.target,
        "target_reason": first and first.target_reason,
        "reader": first and first.reader,
        "reader_reason": first and first.reader_reason,
        "direct": all(source.direct for source in pull.sources),
        "sources": [
            {
                "path": source.path,
                "direct": source.direct,
                "alignment": source.alignment,
                "reason": source.reason,
            }
            for source in pull.sources
        ],
        "arrays": [_describe_array(array) for array in pull.arrays],
    }


def describe_failure(path: str, error: str) -> dict[str, Any]:
    """Return what stands for a file that could not be pulled."""
    return {"path": path, "ok": False, "error": error}


def print_trimmed(console: Console, renderable: RenderableType) -> None:
    """Print without the blanks that rich fills lines with."""
    with console.capture() as capture:
        console.print(renderable)
    lines = capture.get().splitlines()
    console.file.write("".join(f"{line.rstrip()}\n" for line in lines))


def _describe_array(array: PulledArray) -> dict[str, Any]:
    entry = array.entry
    return {
        "name": entry.name,
        "path": entry.path,
        "dtype": entry.dtype_name,
        "shape": list(entry.shape),
        "start": entry.start,
        "end": entry.end,
        "bytes": entry.nbytes,
        "ok": array.ok,
        "status": array.status.name,
        "errno": array.errno,
        "mismatch": array.mismatch,
        "crc32": _checksum(array),
    }


def _checksum(array: PulledArray) -> str | None:
    return f"{array.crc32:08x}" if array.status == 0 else None


def _array_table(arrays: tuple[PulledArray, ...]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1), header_style="underline")
    table.add_column("name", overflow="fold")
    table.add_column("dtype", no_wrap=True)
    table.add_column("shape", overflow="fold")
    table.add_column("bytes", justify="right", no_wrap=True)
    table.add_column("status", overflow="fold")
    table.add_column("crc32", no_wrap=True)
    for array in arrays:
        table.add_row(
            Text(printable(array.entry.name)),
            Text(printable(array.entry.dtype_name)),
            str(array.entry.shape),
            f"{array.entry.nbytes:,}",
            Text(array.verdict, style="green" if array.ok else "bold red"),
            _checksum(array) or "-",
        )
    return table


def _summary_table(pull: Pull) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, style="dim")
    table.add_column(overflow="fold")
    for source in pull.sources[:1]:
        table.add_row("target", f"{source.target} ({source.target_reason})")
        table.add_row("reader", f"{source.reader} ({source.reader_reason})")
    for answer, count in _count_modes(pull.sources).items():
        files = f", {count} of {len(pull.sources)} files" if count < len(pull.sources) else ""
        table.add_row("direct", answer + files)
    at_once = min(pull.requests, pull.window)
    table.add_row("requests", f"{pull.requests:,} by the kernel, up to {at_once:,} in flight")
    table.add_row("reads", f"{pull.reads:,}")
    table.add_row("seconds", f"{pull.seconds:.4f}")
    speed = pull.gb_per_s
    table.add_row("GB/s", "-" if speed is None else f"{speed:.2f}")
    table.add_row("check", _verdict(pull))
    return table


def _verdict(pull: Pull) -> Text:
    wrong = [printable(array.entry.name) for array in pull.arrays if not array.ok]
    if not wrong:
        return Text(f"all {pull.nbytes:,} bytes are as a buffered read has them", style="green")
    named = ", ".join(wrong[:_NAMED_ARRAYS]) + (", ..." if len(wrong) > _NAMED_ARRAYS else "")
    return Text(f"{len(wrong)} of {len(pull.arrays)} failed: {named}", style="bold red")


def _count_modes(sources: tuple[Explanation, ...]) -> dict[str, int]:
    """Return how many of the files are read in each way."""
    counts: dict[str, int] = {}
    for source in sources:
        answer = f"{'yes' if source.direct else 'no'} ({source.reason})"
        counts[answer] = counts.get(answer, 0) + 1
    return counts
