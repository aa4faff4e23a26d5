"""How a long call tells how far it is: a bar on a terminal, or the caller's own function."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Progress = Callable[[int, int], None]
"""Called in the caller's thread with the bytes that are done and those of the whole."""


@contextmanager
def telling(progress: bool | Progress, title: str, total: int) -> Iterator[Callable[[int], None]]:
    """Give a function to call with the bytes done since its last call.

    Parameters
    ----------
    progress : bool or function
        True for a bar on standard error, which appears only where that is a terminal.
    title : str
    total : int
        Bytes.
    """
    with _teller(progress, title, total) as tell:
        done = 0

        def advance(nbytes: int) -> None:
            nonlocal done
            done += nbytes
            tell(done, total)

        advance(0)
        yield advance


@contextmanager
def _teller(progress: bool | Progress, title: str, total: int) -> Iterator[Progress]:
    if callable(progress):
        yield progress
    elif progress and sys.stderr.isatty():
        with _bar(title, total) as tell:
            yield tell
    else:
        yield lambda _done, _total: None


@contextmanager
def _bar(title: str, total: int) -> Iterator[Progress]:
    # Here, since it takes longer to import than all of gpuq's own modules that need no compiler.
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
    )
    shown = "".join(character if character.isprintable() else "?" for character in title)
    with Bar(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(shown, total=total)
        yield lambda done, _total: bar.update(task, completed=done)
