"""A program for `gpuq.bench.load`: loads a ``.safetensors`` file once, one way, and prints figures.

It runs under the Python that has the way's library, which need not have gpuq: only the standard
library is imported at the top, and each way imports what it needs. A small file is loaded first,
untimed, so that what a library sets up once is not measured.

Arguments: the way, the file, a small file, "cached" or "cold", which the file is, and 1 to print a
digest of all arrays (else 0).
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import importlib
import json
import mmap
import os
import resource
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

_BLOCK_BYTES = 8 << 20
_PAGE = 4096
_COPIES = 3  # of a file in memory: in the page cache, and two that a way may hold at once
_WALK_BYTES = 2 << 20
_FAR = 12.0  # times as long as the fastest block
_LEAST_WATCHED = 256 << 20  # a load of less is over before some of its memory is taken
_PERIOD_SECONDS = 2.2
_MOST_PERIODS = 4

# Loads the file at a path, and what to call after the last load.
Way = tuple[Callable[[str], Any], Callable[[], None] | None]


def layout_of(path: str) -> dict[str, Any]:
    """Return {name: (dtype, shape, start, end)} of a file, positions in bytes of the file."""
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    return {
        name: (about["dtype"], about["shape"], *(8 + length + at for at in about["data_offsets"]))
        for name, about in header.items()
    }


def _dtype(name: str) -> Any:
    import numpy as np

    return np.dtype({"F32": "<f4", "F16": "<f2", "I8": "i1"}[name])


def gpuq(direct: str) -> Way:
    """Load by `Loader.load`; the loader is open before."""
    from gpuq.loader import Loader

    loader = Loader(target="cpu", direct=direct)
    return loader.load, loader.close


def safetensors() -> Way:
    """Load by the package's NumPy half, which reads each tensor into an array of its own."""
    from safetensors.numpy import load_file

    return load_file, None


def fastsafetensors(direct: bool) -> Way:
    """Load without GPUDirect Storage, to the CPU."""
    os.environ["FASTSAFETENSORS_ODIRECT"] = str(int(direct))
    from fastsafetensors import SafeTensorsFileLoader, SingleGroup

    def load(path: str) -> Any:
        loader = SafeTensorsFileLoader(SingleGroup(), device="cpu", nogds=True)
        loader.add_filenames({0: [path]})
        buffers = loader.copy_files_to_device()
        tensors = {name: buffers.get_tensor(name) for name in loader.get_keys()}
        buffers.close()
        loader.close()
        return tensors

    return load, None


def runai(strategy: str) -> Way:
    """Load by the run:ai model streamer, which gives every tensor to its caller."""
    os.environ["RUNAI_STREAMER_FS_STRATEGY"] = strategy
    from runai_model_streamer import SafetensorsStreamer

    def load(path: str) -> Any:
        with SafetensorsStreamer() as streamer:
            streamer.stream_file(path)
            return dict(streamer.get_tensors())

    return load, None


def tensorstore(mode: str) -> Way:
    """Read each tensor's range by the key-value store over files, all at once."""
    import numpy as np
    import tensorstore as ts

    def load(path: str) -> Any:
        context = ts.Context({"file_io_mode": {"mode": mode}})
        directory, _, key = path.rpartition("/")
        store = ts.KvStore.open({"driver": "file", "path": directory + "/"}, context=context)
        store = store.result()
        described = layout_of(path)
        reads = {
            name: store.read(key, byte_range=slice(start, end))
            for name, (_, _, start, end) in described.items()
        }
        return {
            name: np.frombuffer(read.result().value, _dtype(described[name][0])).reshape(
                described[name][1]
            )
            for name, read in reads.items()
        }

    return load, None


def fromfile() -> Way:
    """Load each tensor by `numpy.fromfile`."""
    import numpy as np

    def load(path: str) -> Any:
        return {
            name: np.fromfile(
                path, _dtype(dtype), (end - start) // _dtype(dtype).itemsize, offset=start
            ).reshape(shape)
            for name, (dtype, shape, start, end) in layout_of(path).items()
        }

    return load, None


def preadv() -> Way:
    """Read the whole file with O_DIRECT, block after block, and give views of it."""
    import numpy as np

    def load(path: str) -> Any:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
        try:
            size = os.fstat(descriptor).st_size
            memory = mmap.mmap(-1, -(-size // _PAGE) * _PAGE)
            view = memoryview(memory)
            got = 0
            while got < size:
                step = os.preadv(descriptor, [view[got : got + _BLOCK_BYTES]], got)
                if step == 0:
                    raise EOFError(path)
                got += step
        finally:
            os.close(descriptor)
        return {
            name: np.frombuffer(
                memory, _dtype(dtype), (end - start) // _dtype(dtype).itemsize, start
            ).reshape(shape)
            for name, (dtype, shape, start, end) in layout_of(path).items()
        }

    return load, None


WAYS: dict[str, Callable[[], Way]] = {
    "gpuq direct": lambda: gpuq("require"),
    "gpuq buffered": lambda: gpuq("off"),
    "safetensors buffered": safetensors,
    "fastsafetensors direct": lambda: fastsafetensors(True),
    "fastsafetensors buffered": lambda: fastsafetensors(False),
    "run:ai streamer direct": lambda: runai("io_uring_direct,libaio_direct"),
    "run:ai streamer buffered": lambda: runai("io_uring_buffered,sync_buffered"),
    "tensorstore direct": lambda: tensorstore("direct"),
    "tensorstore buffered": lambda: tensorstore("default"),
    "np.fromfile buffered": fromfile,
    "preadv loop direct": preadv,
}
NEEDS = {
    "gpuq": ("gpuq",),
    "safetensors": ("safetensors", "numpy"),
    "fastsafetensors": ("fastsafetensors", "torch", "numpy"),
    "run:ai streamer": ("runai_model_streamer", "torch", "numpy"),
    "tensorstore": ("tensorstore", "numpy"),
    "np.fromfile": ("numpy",),
    "preadv loop": ("numpy",),
}


def missing(contestant: str) -> str:
    """Return why a contestant cannot run under this Python, "" where it can."""
    for module in NEEDS[contestant]:
        try:
            importlib.import_module(module)
        except Exception as error:  # a package that is there may fail in any way
            return f"{type(error).__name__}: {error}"
    return ""


def digest(names: Iterable[str], bytes_of: Callable[[str], Any]) -> str:
    """Return a digest of all names and bytes."""
    total = hashlib.blake2b(digest_size=16)
    for name in sorted(names):
        total.update(name.encode())
        total.update(bytes_of(name))
    return total.hexdigest()


def _bytes_of(array: Any) -> memoryview:
    return memoryview(array.numpy() if hasattr(array, "numpy") else array).cast("B")


def _walk(nbytes: int) -> bool:
    """Write to new memory, give it back, and say whether all of it was near.

    What is far takes some forty times as long as the fastest block.
    """
    nbytes = -(-nbytes // _WALK_BYTES) * _WALK_BYTES
    slowest, fastest = 0.0, float("inf")
    with mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        with contextlib.suppress(OSError):  # a system may have no huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
        for block in range(0, nbytes, _WALK_BYTES):
            began = time.perf_counter()
            for position in range(block, block + _WALK_BYTES, _PAGE):
                memory[position] = 1
            took = time.perf_counter() - began
            slowest, fastest = max(slowest, took), min(fastest, took)
    return slowest < _FAR * fastest


def make_memory_near(nbytes: int) -> None:
    """Have the system hold so much free memory that was written to a moment ago, in huge pages.

    The host of a virtual machine may take memory back that was free for a while (Linux: free page
    reporting, a part of what is free every two seconds). To clear such a page takes longer than to
    load some: without this, a way is as fast as the memory that it happens to be given. Memory is
    written to until some of it was taken meanwhile, and has come back, so that it is not taken
    while the way is timed; or until none was for longer than such a period.
    """
    _walk(nbytes)
    if nbytes < _LEAST_WATCHED:
        return
    began = time.perf_counter()
    was_taken = False
    while (passed := time.perf_counter() - began) < _MOST_PERIODS * _PERIOD_SECONDS:
        is_near = _walk(nbytes)
        if is_near and (was_taken or passed > _PERIOD_SECONDS):
            return
        was_taken = was_taken or not is_near


def available_memory() -> int:
    """Return how many bytes processes can have without swapping."""
    with open("/proc/meminfo") as file:
        (kib,) = (line.split()[1] for line in file if line.startswith("MemAvailable:"))
    return int(kib) << 10


def read_once(path: str) -> None:
    """Read a file and keep nothing."""
    buffer = bytearray(_BLOCK_BYTES)
    with open(path, "rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def cpu_seconds() -> float:
    """Return the user and system time of this process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    """Load and print figures; or, for "look", what cannot run and why."""
    if sys.argv[1] == "look":
        print(json.dumps({contestant: missing(contestant) for contestant in NEEDS}))
        return
    way, path, small, state, wants_digest = sys.argv[1:]
    load, close = WAYS[way]()
    load(small)
    gc.collect()
    make_memory_near(min(_COPIES * os.path.getsize(path), available_memory() // 2))
    if state == "cached":
        read_once(path)  # its pages are to be as near
    cpu, began = cpu_seconds(), time.perf_counter()
    arrays = load(path)
    seconds, cpu = time.perf_counter() - began, cpu_seconds() - cpu
    total = digest(arrays, lambda name: _bytes_of(arrays[name])) if wants_digest == "1" else ""
    if close is not None:
        close()
    figures = {
        "seconds": seconds,
        "cpu_seconds": cpu,
        "all_cpu_seconds": cpu_seconds(),
        "digest": total,
    }
    print("\n" + json.dumps(figures))


if __name__ == "__main__":
    main()
