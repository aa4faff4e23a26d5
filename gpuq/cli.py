"""The ``gpuq`` command.

Every failure that a user can cause is one line on standard error. Results go to standard
output, and nothing else does.
"""

from __future__ import annotations

import difflib
import json
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpuq.bench.cli import app as bench_app
from gpuq.config import DIRECT_MODES, READERS, TARGETS, LoaderConfig
from gpuq.ending import INTERRUPTED, Report, complain, describe, reporting, told_when_compiling
from gpuq.errors import ConfigError, GpuqError
from gpuq.trace.cli import trace as trace_command
from gpuq.version import __version__

if TYPE_CHECKING:
    from gpuq.formats import ArrayEntry, ArrayFile
    from gpuq.host.taken import Trace
    from gpuq.loader import Loader
    from gpuq.pull_files import Progress, Pull

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(bench_app, name="bench")


def main() -> None:
    """Run the command line."""
    for stream in (sys.stdout, sys.stderr):
        # A name that the terminal's encoding lacks must not end the command.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    try:
        app(prog_name="gpuq")
    except (SystemExit, KeyboardInterrupt) as end:
        if isinstance(end, SystemExit) and end.code != INTERRUPTED:
            raise
        complain("interrupted")
        sys.exit(INTERRUPTED)


def _print_version(asked: bool) -> None:
    if asked:
        print(f"gpuq {__version__}")
        raise typer.Exit


@app.callback()
def _gpuq(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """A running Numba kernel pulls bytes out of files."""


@app.command()
def pull(
    files: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE",
            help=".safetensors, .safetensors.index.json (all its shards), .npy; any other is raw: "
            "one array of bytes.",
            show_default=False,
        ),
    ],
    tensor: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Pull only this array; may be repeated. With several files: from whoever has it.",
            show_default=False,
        ),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            metavar="|".join(TARGETS),
            help="Where the kernel runs. Default: GPUQ_TARGET, or auto.",
        ),
    ] = None,
    reader: Annotated[
        str | None,
        typer.Option(metavar="|".join(READERS), help="What reads. Default: GPUQ_READER, or auto."),
    ] = None,
    direct: Annotated[
        str | None,
        typer.Option(
            metavar="|".join(DIRECT_MODES),
            help="Whether reads bypass the page cache (O_DIRECT). Default: GPUQ_DIRECT, or auto.",
        ),
    ] = None,
    slots: Annotated[
        int, typer.Option(help="Requests in flight at most; a power of two.")
    ] = LoaderConfig.slots,
    staging_buffers: Annotated[
        int, typer.Option(help="Reads in flight at most.")
    ] = LoaderConfig.staging_buffers,
    staging_bytes: Annotated[
        int, typer.Option(help="Bytes of one read at most; a multiple of 4096.")
    ] = LoaderConfig.staging_bytes,
    slice_bytes: Annotated[
        int | None,
        typer.Option(
            help="Bytes of one request, 512 or more. Default: as --staging-bytes.",
            show_default=False,
        ),
    ] = None,
    trace: Annotated[
        str | None,
        typer.Option(
            metavar="OUT.npz",
            help="Write what happened to each request here; see gpuq trace.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON instead of tables, and nothing else.")
    ] = False,
) -> None:
    """Pull every array of FILE... with requests made inside a running kernel, and check each byte.

    The kernel asks for slices of each array, many at once; what arrives is compared with an
    ordinary buffered read of the file. A table shows each array with its status and the CRC-32
    of its bytes; GB/s counts the pull alone, without starting and checking.

    A file that cannot be pulled is one line on standard error that names it and the cause; the
    others are pulled all the same. The exit code is 0 if every byte of every file was right, 1 if
    not, 130 after Ctrl-C.
    """
    from gpuq.trace.recording import RECORDS, check_apart, recorded

    def tell(taken: Trace) -> None:
        if not as_json:
            print(f"trace of {len(taken):,} requests; to see it: gpuq trace {trace}")

    with reporting(as_json) as report:
        config = _settings(
            target=target,
            reader=reader,
            direct=direct,
            slots=slots,
            staging_buffers=staging_buffers,
            staging_bytes=staging_bytes,
            slice_bytes=slice_bytes,
            trace=RECORDS if trace else None,
        )
        chosen = _choose(report, files, tensor or [])
        read = [entry.path for _, _, entries in chosen for entry in entries]
        check_apart(trace, [*files, *read])
        if chosen:
            with _started(config) as loader, recorded(loader, trace, tell) as take:
                for path, found, entries in chosen:
                    _pull_one(report, loader, path, found, entries, slice_bytes, take)


@app.command()
def demo(
    mib: Annotated[int, typer.Option(min=1, max=200, help="Size of the file, in MiB.")] = 40,
) -> None:
    """Make a file with arrays at odd offsets, let a kernel pull it, and say what happened.

    The file stands in the temporary directory (TMPDIR) and is removed in the end. Target, reader
    and mode follow GPUQ_TARGET, GPUQ_READER and GPUQ_DIRECT, as for every loader.
    """
    from gpuq.demo import write_demo_file
    from gpuq.pull_files import find_arrays

    with reporting(as_json=False) as report:
        with (
            _started(_settings()) as loader,
            tempfile.TemporaryDirectory(prefix="gpuq-demo-") as folder,
        ):
            path = os.path.join(folder, "demo.safetensors")
            try:
                write_demo_file(path, mib)
            except OSError as error:
                raise OSError(error.errno, error.strerror, path) from None
            found = find_arrays(path)
            pulled = _pull_one(report, loader, path, found, list(found.values()), None)
        if pulled is not None and pulled.ok:
            report.tell_story(pulled)


app.command(name="trace")(trace_command)


@app.command()
def doctor(
    paths: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PATH",
            help="Files or block devices to examine; in a directory, by a temporary file.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON instead of tables, and nothing else.")
    ] = False,
) -> None:
    """Say what works here and what does not, why, and what to do about it.

    All is really tried, in the end by kernels that pull bytes. What "stops" is needed; for what
    says "no" or "degraded" there is something else, which is used.

    The exit code is 0 if kernels can pull files here, with a GPU or without, and each PATH can
    be read; else 1.
    """
    from gpuq.doctor import diagnose, obstacles
    from gpuq.doctor.table import describe_findings, show_findings
    from gpuq.report import open_console

    with reporting(as_json=False) as report:
        with told_when_compiling():
            findings = diagnose(paths or [])
        if as_json:
            print(json.dumps(describe_findings(findings), indent=2))
        else:
            show_findings(open_console(), findings)
        for obstacle in obstacles(findings):
            report.fail(obstacle)


@app.command()
def race(
    trace: Annotated[
        str | None,
        typer.Option(metavar="FILE.csv", help="Write every step here.", show_default=False),
    ] = None,
    picture: Annotated[
        str | None,
        typer.Option(
            metavar="FILE.svg|FILE.png",
            help="Draw here who holds which buffer at each step.",
            show_default=False,
        ),
    ] = None,
    watchdog: Annotated[
        float, typer.Option(min=0.01, help="Seconds until the gates are opened whatever happens.")
    ] = 30.0,
    stuck: Annotated[
        bool, typer.Option("--stuck", help="Leave a gate shut, to see the watchdog end the run.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON instead of tables, and nothing else.")
    ] = False,
) -> None:
    """Show a race in which another file's bytes go out, and that gpuq's buffers are free of it.

    It is the one of NVIDIA DALI issue 6623, in a forced order: models of its pool of buffers, as
    it was ("original") and with a second look at the event ("event recheck"), then gpuq's own
    pool under the same schedule. No GPU is needed: a stream in software copies, held by gates.

    The exit code is 0 if the models show the published figures and gpuq used no buffer too early,
    and 1 if not, or if the watchdog had to open a gate.
    """
    from gpuq.race.command import race_pools

    with reporting(as_json=False) as report, told_when_compiling():
        for fault in race_pools(trace, picture, watchdog, stuck, as_json):
            report.fail(fault)


@app.command()
def soak(
    seconds: Annotated[float, typer.Option(min=0, help="How long.")] = 60.0,
    seed: Annotated[
        int | None,
        typer.Option(min=0, help="Of every random choice. Default: a new one.", show_default=False),
    ] = None,
    folder: Annotated[
        str | None,
        typer.Option(
            metavar="DIRECTORY",
            help="Where its files are made, and removed. Default: TMPDIR.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON instead of a table, and nothing else.")
    ] = False,
) -> None:
    """Pull random bytes for as long as you like, and check every one, while all is changed.

    Kernels on the CPU target ask for ranges of all sizes, through both readers in turn, while a
    thread truncates, grows and replaces the files, closes and opens sources, takes destinations
    away, and ends loaders under running kernels. The content of the files follows from file and
    offset, so every byte of every destination is checked, and every status that is certain.

    The exit code is 0 if all was right; else 1, with the file, the offset and the seed.
    """
    from gpuq.soak.command import soak_loaders

    with reporting(as_json=False) as report, told_when_compiling():
        fault = soak_loaders(seconds, seed, folder, as_json)
        if fault is not None:
            report.fail(fault)


def _settings(slice_bytes: int | None = None, **settings: Any) -> LoaderConfig:
    """Build the settings; an error names the option as it was typed."""
    from gpuq.pull_files import check_slice_bytes

    try:
        if slice_bytes is not None:
            check_slice_bytes(slice_bytes)
        return LoaderConfig.from_environment(**settings)
    except ConfigError as error:
        name, space, rest = str(error).partition(" ")
        if name == "slice_bytes" or name in settings:
            raise ConfigError(f"--{name.replace('_', '-')}{space}{rest}") from None
        raise


def _choose(
    report: Report, paths: Sequence[str], names: Sequence[str]
) -> list[tuple[str, ArrayFile, list[ArrayEntry]]]:
    """Find what is to be pulled of each file; complain about files and names that are not there."""
    from gpuq.pull_files import find_arrays

    found: list[tuple[str, ArrayFile]] = []
    for path in paths:
        try:
            found.append((path, find_arrays(path)))
        except (GpuqError, OSError) as error:
            report.fail(describe(error, path), path)
    if not names:
        return [(path, arrays, list(arrays.values())) for path, arrays in found]
    known = list(dict.fromkeys(name for _, arrays in found for name in arrays))
    for name in names:
        if found and name not in known:
            where = found[0][0] if len(paths) == 1 else f"any of {len(found)} files"
            report.fail(f"no array {name!r} in {where}; {_suggest(name, known)}")
    wanted = set(names)
    chosen = [
        (path, arrays, [entry for entry in arrays.values() if entry.name in wanted])
        for path, arrays in found
    ]
    return [choice for choice in chosen if choice[2]]


def _suggest(name: str, known: Sequence[str]) -> str:
    """Name the arrays that a mistyped name may have meant."""
    close = difflib.get_close_matches(name, known, n=3)
    close += [other for other in known if name in other and other not in close][: 3 - len(close)]
    if close:
        return f"close to it: {', '.join(close)}"
    return f"there are {len(known)}, such as {', '.join(known[:3])}" if known else "there are none"


def _pull_one(
    report: Report,
    loader: Loader,
    path: str,
    found: ArrayFile,
    entries: Sequence[ArrayEntry],
    slice_bytes: int | None,
    take: Callable[[], None] = lambda: None,
) -> Pull | None:
    """Pull one file and show it; a failure is its line. `take` is called now and then."""
    from gpuq.pull_files import pull_arrays

    try:
        with _progress_bar(sum(entry.nbytes for entry in entries)) as draw:

            def look(stage: str, done: int) -> None:
                take()
                if draw is not None:
                    draw(stage, done)

            pulled = pull_arrays(loader, entries, slice_bytes=slice_bytes, on_progress=look)
    except (GpuqError, OSError, MemoryError) as error:
        report.fail(describe(error, path), path)
        return None
    report.succeed(path, found.format, pulled)
    return pulled


@contextmanager
def _started(config: LoaderConfig) -> Iterator[Loader]:
    """Give a loader with the kernel compiled; say so where that takes its time."""
    from gpuq.pull_files import prepare

    with ExitStack() as stack:
        with told_when_compiling(), _ending_at_ctrl_c():
            loader = stack.enter_context(_make_loader(config))
            prepare(loader)
        yield loader


def _make_loader(config: LoaderConfig) -> Loader:
    from gpuq.loader import Loader

    try:
        return Loader(config)
    except GpuqError:
        raise
    except OSError as error:
        staging = config.staging_buffers * config.staging_bytes
        raise OSError(
            error.errno,
            f"the loader cannot start: {error.strerror}; its staging takes {staging:,} bytes",
        ) from None


@contextmanager
def _ending_at_ctrl_c() -> Iterator[None]:
    """Let Ctrl-C end the process on the spot.

    An exception raised inside Numba's compiler leaves objects of LLVM half made, and the process
    crashes when it frees them (seen with llvmlite 0.50). Nothing is at stake yet.
    """

    def end(_number: int, _frame: Any) -> None:
        complain("interrupted")
        os._exit(INTERRUPTED)

    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def _progress_bar(nbytes: int) -> Iterator[Progress | None]:
    """Draw on standard error where that is a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        tasks = {stage: progress.add_task(stage, total=nbytes) for stage in ("pull", "check")}
        yield lambda stage, done: progress.update(tasks[stage], completed=done)
