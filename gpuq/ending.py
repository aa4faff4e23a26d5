"""How a command ends: one line for each failure, one exit code, and no traceback for a user.

Bugs keep their tracebacks.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

from gpuq.errors import GpuqError
from gpuq.version import __version__

if TYPE_CHECKING:
    from gpuq.pull_files import Pull

INTERRUPTED = 128 + 2  # as a shell reports SIGINT


class Report:
    """What a command prints, and whether all went well."""

    def __init__(self, as_json: bool) -> None:
        self.is_right = True
        self._as_json = as_json
        self._files: list[dict[str, Any]] = []
        self._error: str | None = None

    def succeed(self, path: str, format_name: str, pull: Pull) -> None:
        """Show one file."""
        from gpuq.report import describe_pull, open_console, show_pull

        self.is_right &= pull.ok
        self._files.append(describe_pull(path, format_name, pull))
        if not self._as_json:
            show_pull(open_console(), path, format_name, pull)

    def fail(self, message: str, path: str | None = None) -> None:
        """Say what went wrong, in one line; `path` where it was one file that failed."""
        from gpuq.report import describe_failure

        self.is_right = False
        complain(message)
        if path is None:
            self._error = message
        else:
            self._files.append(describe_failure(path, message))

    def tell_story(self, pull: Pull) -> None:
        """Say in plain words what a successful demo did."""
        from gpuq.report import open_console, tell_story

        tell_story(open_console(), pull)

    def finish(self) -> None:
        """Print what can only be said in the end."""
        if self._as_json:
            document = {
                "gpuq": __version__,
                "ok": self.is_right,
                "error": self._error,
                "files": self._files,
            }
            print(json.dumps(document, indent=2))
        elif len(self._files) > 1:
            right = sum(file["ok"] for file in self._files)
            print(f"{right} of {len(self._files)} files right")
        sys.stdout.flush()


@contextmanager
def reporting(as_json: bool) -> Iterator[Report]:
    """Turn what a user can cause into one line, and all into an exit code; bugs keep tracebacks."""
    report = Report(as_json)
    try:
        try:
            yield report
        except BrokenPipeError:
            raise
        except (GpuqError, OSError, MemoryError) as error:
            report.fail(describe(error))
        report.finish()
    except BrokenPipeError:
        # Whoever read the output has gone, and wants no complaint; nor must the flush at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(1) from None
    except OSError as error:
        complain(f"standard output: {error.strerror}")
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    raise typer.Exit(0 if report.is_right else 1)


@contextmanager
def told_when_compiling() -> Iterator[None]:
    """Say on standard error that code is compiled, when it is and not found in Numba's cache."""
    from numba.core import event

    class Notice(event.Listener):  # type: ignore[misc]
        is_due = True

        def on_start(self, _event: Any) -> None:
            if self.is_due:
                self.is_due = False
                complain("compiling for this machine, once; it takes about ten seconds ...")

        def on_end(self, _event: Any) -> None:
            pass

    with event.install_listener("numba:compile", Notice()):
        yield


def describe(error: BaseException, path: str | None = None) -> str:
    """Say an error in one line that names the file."""
    if isinstance(error, MemoryError):
        text = "not enough memory for its arrays" if path else "not enough memory"
    elif isinstance(error, OSError) and error.strerror:
        text = error.strerror
        path = error.filename or path
    else:
        text = str(error)
    return text if path is None or text.startswith(f"{path}:") else f"{path}: {text}"


def complain(message: str) -> None:
    """Print one line on standard error, whatever stands in the message."""
    from gpuq.report import printable

    print(f"gpuq: {printable(message)}", file=sys.stderr, flush=True)
