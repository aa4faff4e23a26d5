"""Work in processes of its own, beside the tests: it takes the cores that they leave.

Most tests keep one core busy. What needs nothing of theirs begins with the session's first test
and gives way to all of them; the tests that it belongs to wait for its end.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest

_LESS_URGENT = 5
"""Added to their nice value; with more they would starve where others keep all cores busy."""


@functools.cache
def pool() -> ProcessPoolExecutor:
    """Return the processes: new ones, for threads of this one would not survive a fork."""
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(
        os.cpu_count() or 1, mp_context=context, initializer=os.nice, initargs=(_LESS_URGENT,)
    )


def begin_all(session: pytest.Session, *begins: Callable[[pytest.Session], None]) -> None:
    """Call all of `begins`, and ``begin_beside`` of each module of the selected tests."""
    session.config.pluginmanager.register(_End(), "the end of what runs beside")
    modules = dict.fromkeys(getattr(item, "module", None) for item in session.items)
    found = (getattr(module, "begin_beside", None) for module in modules)
    for begin in (*begins, *found):
        if begin is not None:
            begin(session)


class _End:
    """A plugin that cancels what nobody waits for: a session may end early, with -x say."""

    def pytest_sessionfinish(self) -> None:
        if pool.cache_info().currsize:
            pool().shutdown(wait=False, cancel_futures=True)


def print_at_the_end(config: pytest.Config, name: str, lines: Callable[[], Any]) -> None:
    """Have ``lines()`` printed when the tests are over."""

    class Summary:
        def pytest_terminal_summary(self, terminalreporter: Any) -> None:
            for line in lines():
                terminalreporter.write_line(line)

    config.pluginmanager.register(Summary(), name)
