"""The command line of the benchmarks: ``gpuq bench``, or ``python -m gpuq.bench``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from gpuq.bench.options import (
    Cold,
    Direct,
    Directory,
    File,
    Json,
    Keep,
    PeersPython,
    Reader,
    Rounds,
    Seconds,
    Size,
    changes_of,
    one_of,
)
from gpuq.config import READERS, LoaderConfig

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Measure, interleaved with a peer where there is one.",
    context_settings={"help_option_names": ["-h", "--help"]},
)

_GIB = 1 << 30


@contextmanager
def _bench(
    name: str,
    file: Path | None,
    size: int,
    directory: Path,
    keep: bool,
    json_file: Path | None,
    settings: dict[str, Any],
) -> Iterator[tuple[Path, int, list[Any]]]:
    """Yield the file, its bytes, and a list to put the result in; then write the report."""
    from gpuq.bench.files import bench_file
    from gpuq.bench.measuring import console

    with (
        _reporting(name, file.parent if file else directory, json_file, settings) as result,
        bench_file(file, size, directory, keep=keep) as (path, nbytes),
    ):
        settings["bytes"] = nbytes
        console.print(f"{path}, {nbytes / 2**20:,.0f} MiB")
        yield path, nbytes, result


@contextmanager
def _reporting(
    name: str, directory: Path, json_file: Path | None, settings: dict[str, Any]
) -> Iterator[list[Any]]:
    """Describe the machine, yield a list to put the result in, and write the report.

    What a user can cause ends as one line on standard error.
    """
    from gpuq.bench.fio import FioError
    from gpuq.bench.load import WorkerError, WrongBytesError
    from gpuq.bench.machine import describe_machine
    from gpuq.bench.measuring import console, report, write_json
    from gpuq.bench.page_cache import CacheStateError
    from gpuq.bench.reading import BadStatusError
    from gpuq.errors import GpuqError

    theirs = (FioError, BadStatusError, WorkerError, WrongBytesError, CacheStateError)
    result: list[Any] = []
    try:
        machine = describe_machine(directory)
        console.print(str(machine))
        yield result
        write_json(json_file, report(name, machine, settings, result[0]))
    except (OSError, ValueError, GpuqError, *theirs) as error:
        print(f"gpuq bench {name}: {error}", file=sys.stderr)
        raise typer.Exit(1) from None


@app.command("all")
def whole(
    size: Annotated[int, typer.Option(min=1 << 24, help="Bytes of the files.")] = _GIB,
    directory: Directory = Path(),
    seconds: Annotated[float, typer.Option(min=0.001, help="Of most samples.")] = 1.0,
    rounds: Rounds = 5,
    peers_python: PeersPython = sys.executable,
    cold: Cold = True,
    direct: Direct = "auto",
    json_file: Json = None,
) -> None:
    """Run every benchmark that has an aim, for 15 minutes; print what came out beside it."""
    from gpuq.bench import whole as bench
    from gpuq.bench.measuring import console

    settings = {
        "bytes": size,
        "seconds": seconds,
        "rounds": rounds,
        "peers_python": peers_python,
        "cold": cold,
        "direct": direct,
    }
    with _reporting("all", directory, json_file, settings) as result:
        with console.status("making the file") as status:
            result.append(
                bench.measure(
                    directory,
                    size,
                    peers_python=peers_python,
                    direct=direct,
                    seconds=seconds,
                    rounds=rounds,
                    cold=cold,
                    watch=status.update,
                )
            )
        bench.show(result[0])


@app.command()
def io(
    file: File = None,
    size: Size = _GIB,
    directory: Directory = Path(),
    keep: Keep = False,
    seconds: Seconds = 2.0,
    rounds: Rounds = 5,
    depth: Annotated[
        list[int] | None,
        typer.Option(min=1, max=1024, help="Of the random reads; may be repeated."),
    ] = None,
    reader: Annotated[
        list[str] | None,
        typer.Option(
            callback=lambda value: one_of(READERS)(value or []),
            help="auto, io_uring or threads; may be repeated.",
        ),
    ] = None,
    direct: Direct = "auto",
    json_file: Json = None,
) -> None:
    """Read through the queue on the CPU target, beside fio."""
    from gpuq.bench import io as bench
    from gpuq.bench.fio import find_fio
    from gpuq.bench.measuring import console

    depths, readers = depth or list(bench.DEPTHS), reader or ["auto"]
    settings = {
        "seconds": seconds,
        "rounds": rounds,
        "depths": depths,
        "readers": readers,
        "direct": direct,
    }
    with _bench("io", file, size, directory, keep, json_file, settings) as (path, nbytes, result):
        if find_fio() is None:
            console.print("fio is not installed: gpuq runs alone, with nothing to compare it with.")
        with console.status("measuring") as status:
            result.append(
                bench.measure(
                    path,
                    nbytes,
                    depths=depths,
                    readers=readers,
                    direct=direct,
                    seconds=seconds,
                    rounds=rounds,
                    watch=status.update,
                )
            )
        bench.show(result[0])


@app.command()
def gil(
    file: File = None,
    size: Size = _GIB,
    directory: Directory = Path(),
    keep: Keep = False,
    seconds: Seconds = 2.0,
    rounds: Rounds = 5,
    reader: Reader = "auto",
    direct: Direct = "auto",
    json_file: Json = None,
) -> None:
    """Read while the main thread runs Python, native code, or nothing."""
    from gpuq.bench import gil as bench

    settings = {"seconds": seconds, "rounds": rounds, "reader": reader, "direct": direct}
    with _bench("gil", file, size, directory, keep, json_file, settings) as (path, nbytes, result):
        result.append(
            bench.measure(
                path, nbytes, reader=reader, direct=direct, seconds=seconds, rounds=rounds
            )
        )
        bench.show(result[0])


@app.command()
def memory(
    file: File = None,
    size: Size = _GIB,
    directory: Directory = Path(),
    keep: Keep = False,
    rounds: Rounds = 3,
    reader: Reader = "auto",
    direct: Direct = "auto",
    json_file: Json = None,
) -> None:
    """Pull a file far larger than staging, and watch the resident size."""
    from gpuq.bench import memory as bench

    settings = {"rounds": rounds, "reader": reader, "direct": direct}
    with _bench("memory", file, size, directory, keep, json_file, settings) as (
        path,
        nbytes,
        result,
    ):
        result.append(bench.measure(path, nbytes, reader=reader, direct=direct, rounds=rounds))
        bench.show(result[0])


@app.command()
def start(
    file: File = None,
    directory: Directory = Path(),
    keep: Keep = False,
    rounds: Rounds = 3,
    cold: Cold = True,
    json_file: Json = None,
) -> None:
    """Import gpuq and make a Loader, in new interpreters, with a cold cache and a warm one."""
    from gpuq.bench import start as bench

    settings = {"rounds": rounds, "cold": cold}
    with _bench("start", file, 1 << 20, directory, keep, json_file, settings) as (
        path,
        _,
        result,
    ):
        result.append(bench.measure(path, rounds=rounds, cold=cold))
        bench.show(result[0])


@app.command()
def idle(
    file: File = None,
    size: Size = _GIB,
    directory: Directory = Path(),
    keep: Keep = False,
    seconds: Seconds = 2.0,
    rounds: Rounds = 5,
    rest: Annotated[float, typer.Option(min=0.0, help="Seconds of idling before.")] = 1.0,
    reader: Reader = "auto",
    direct: Direct = "auto",
    json_file: Json = None,
) -> None:
    """Let a Loader idle: what it costs, and how late the first request after that is."""
    from gpuq.bench import idle as bench

    settings = {
        "seconds": seconds,
        "rounds": rounds,
        "rest": rest,
        "reader": reader,
        "direct": direct,
    }
    with _bench("idle", file, size, directory, keep, json_file, settings) as (path, nbytes, result):
        result.append(
            bench.measure(
                path,
                nbytes,
                reader=reader,
                direct=direct,
                seconds=seconds,
                rounds=rounds,
                idle_seconds=rest,
            )
        )
        bench.show(result[0])


@app.command()
def load(
    size: Size = _GIB,
    directory: Directory = Path(),
    keep: Keep = False,
    rounds: Rounds = 5,
    peers_python: PeersPython = sys.executable,
    json_file: Json = None,
) -> None:
    """Load a .safetensors file into host arrays, beside what else loads one."""
    from gpuq.bench import load as bench
    from gpuq.bench.measuring import console

    settings = {"bytes": size, "rounds": rounds, "peers_python": peers_python}
    with _reporting("load", directory, json_file, settings) as result:
        with console.status("making the file") as status:
            result.append(
                bench.measure(
                    size,
                    directory,
                    peers_python=peers_python,
                    rounds=rounds,
                    keep=keep,
                    watch=status.update,
                )
            )
        bench.show(result[0])


@app.command()
def queue(
    seconds: Annotated[float, typer.Option(min=0.001, help="Of one sample.")] = 0.5,
    rounds: Rounds = 7,
    json_file: Json = None,
) -> None:
    """Cross the queue with nothing to read, beside a flag ping-pong and a well-known ring."""
    from gpuq.bench import queue as bench

    settings = {"seconds": seconds, "rounds": rounds}
    with _reporting("queue", Path(), json_file, settings) as result:
        result.append(bench.measure(seconds=seconds, rounds=rounds))
        bench.show(result[0])


@app.command()
def fair(
    file: File = None,
    size: Size = _GIB,
    directory: Directory = Path(),
    keep: Keep = False,
    seconds: Seconds = 5.0,
    rounds: Rounds = 5,
    buffers: Annotated[
        int, typer.Option(min=2, max=1 << 15, help="Staging buffers; fio's depth of large reads.")
    ] = LoaderConfig.staging_buffers,
    reader: Reader = "auto",
    direct: Direct = "auto",
    json_file: Json = None,
) -> None:
    """Read 4 KiB blocks while the whole file is pulled, beside fio with the same two jobs."""
    from gpuq.bench import fair as bench

    settings = {
        "seconds": seconds,
        "rounds": rounds,
        "buffers": buffers,
        "reader": reader,
        "direct": direct,
    }
    with _bench("fair", file, size, directory, keep, json_file, settings) as (path, nbytes, result):
        result.append(
            bench.measure(
                path,
                nbytes,
                reader=reader,
                direct=direct,
                buffers=buffers,
                seconds=seconds,
                rounds=rounds,
            )
        )
        bench.show(result[0])


@app.command()
def cpu(
    file: File = None,
    size: Size = _GIB,
    directory: Directory = Path(),
    keep: Keep = False,
    seconds: Seconds = 2.0,
    rounds: Rounds = 5,
    reader: Reader = "auto",
    direct: Direct = "auto",
    json_file: Json = None,
) -> None:
    """Count core-seconds for a GiB and for a million requests, beside fio."""
    from gpuq.bench import cpu as bench

    settings = {"seconds": seconds, "rounds": rounds, "reader": reader, "direct": direct}
    with _bench("cpu", file, size, directory, keep, json_file, settings) as (path, nbytes, result):
        result.append(
            bench.measure(
                path, nbytes, reader=reader, direct=direct, seconds=seconds, rounds=rounds
            )
        )
        bench.show(result[0])


@app.command()
def kernels(
    file: File = None,
    size: Size = 1 << 28,
    directory: Directory = Path(),
    keep: Keep = False,
    rounds: Rounds = 7,
    tile: Annotated[int, typer.Option(min=4, help="Bytes of a tile.")] = 256 << 10,
    arithmetic: Annotated[int, typer.Option(min=0, help="Square roots for an element.")] = 4,
    direct: Direct = "auto",
    json_file: Json = None,
) -> None:
    """Add up a file in a kernel: with pull one by one, and with tiles in flight."""
    from gpuq.bench import streaming as bench

    settings = {"rounds": rounds, "tile": tile, "arithmetic": arithmetic, "direct": direct}
    with _bench("kernels", file, size, directory, keep, json_file, settings) as (
        path,
        nbytes,
        result,
    ):
        result.append(
            bench.measure(
                path,
                nbytes,
                tile_bytes=tile,
                arithmetic=arithmetic,
                direct=direct,
                rounds=rounds,
            )
        )
        bench.show(result[0])


@app.command()
def scale(
    size: Annotated[
        list[int] | None, typer.Option(min=1, help="Bytes of a request; may be repeated.")
    ] = None,
    drives: Annotated[list[int] | None, typer.Option(min=1, help="May be repeated.")] = None,
    requests: Annotated[int, typer.Option(min=10, help="Simulated for each case.")] = 4_000,
    spread: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Of times: 0 exact, 1 exponential.")
    ] = 0.5,
    seed: int = 1,
    changed: Annotated[
        list[str] | None, typer.Option("--input", help="NAME=VALUE, in the table's unit.")
    ] = None,
    json_file: Json = None,
) -> None:
    """Model one GPU with several NVMe drives, and simulate the model; nothing is measured."""
    from gpuq.bench import scaling as bench
    from gpuq.bench.measuring import write_json

    settings = {"requests": requests, "spread": spread, "seed": seed}
    try:
        result = bench.measure(
            sizes=size or bench.SIZES,
            drives=drives or bench.DRIVES,
            changes=changes_of(changed or []),
            requests=requests,
            spread=spread,
            seed=seed,
        )
        bench.show(result)
        write_json(json_file, {"bench": "scale", "settings": settings, "results": result})
    except (OSError, ValueError) as error:
        print(f"gpuq bench scale: {error}", file=sys.stderr)
        raise typer.Exit(1) from None


@app.command()
def trace(
    file: File = None,
    size: Size = _GIB >> 2,
    directory: Directory = Path(),
    keep: Keep = False,
    seconds: Seconds = 1.0,
    rounds: Rounds = 7,
    reader: Reader = "auto",
    json_file: Json = None,
) -> None:
    """Read with a trace and without: what a record of each request costs."""
    from gpuq.bench import tracing as bench

    settings = {"seconds": seconds, "rounds": rounds, "reader": reader}
    with _bench("trace", file, size, directory, keep, json_file, settings) as (path, n, result):
        result.append(bench.measure(path, n, reader=reader, seconds=seconds, rounds=rounds))
        bench.show(result[0])
