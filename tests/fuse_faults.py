"""A FUSE file system with faults on order, speaking the kernel's protocol on /dev/fuse itself.

The file system is served by a process of its own, so that nobody waits for himself, and takes
orders from a test through `FaultyFiles`. When that process ends, for whatever reason, the kernel
aborts the connection and every read that waits for it fails: nothing can hang for longer than
the alarm of the process, which each order sets anew.

The layouts are those of the kernel's include/uapi/linux/fuse.h, as far as they are needed.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import select
import signal
import stat
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ALARM_SECONDS = 600
"""How long the server lives without an order; longer than any wait of a test."""

_BUFFER_BYTES = 1 << 18
_MAJOR, _MINOR = 7, 31
_ASYNC_READ, _ASYNC_DIO = 1 << 0, 1 << 15
_FOPEN_DIRECT_IO = 1 << 0
_ROOT = 1
_MS_NOSUID_NODEV = 2 | 4

_LOOKUP, _FORGET, _GETATTR, _OPEN, _READ, _STATFS, _RELEASE = 1, 2, 3, 14, 15, 17, 18
_FLUSH, _INIT, _INTERRUPT, _DESTROY, _BATCH_FORGET = 25, 26, 36, 38, 42


def content(start: int, end: int) -> bytes:
    """Return the bytes that stand at these positions of every file: its words, numbered."""
    first = start // 8
    words = b"".join(b"%07d\n" % n for n in range(first, -(-end // 8)))
    return words[start - 8 * first : end - 8 * first]


# --- the test's side ---


class FaultyFiles:
    """Gives orders to the server; each is answered before the call returns.

    Attributes
    ----------
    place : Path
        Where the files are.
    """

    def __init__(self, place: Path, server: subprocess.Popen[str]) -> None:
        self.place = place
        self._server = server

    def add(self, name: str, size: int, **faults: Any) -> Path:
        """Make a file; see `File` for its faults."""
        self._order("add", name=name, size=size, **faults)
        return self.place / name

    def gate(self, name: str, *, of: str, closed: bool) -> None:
        """Close or open the gate of a file's reads ("reads") or of its size ("sizes").

        What waits at a gate is answered when it is opened.
        """
        self._order("gate", name=name, of=of, closed=closed)

    def seen(self, name: str) -> dict[str, Any]:
        """Say what the server saw: `reads` [[offset, bytes], ...], `held`, `interrupts`."""
        answer = self._order("seen", name=name)
        assert isinstance(answer, dict)
        return answer

    def open_all_gates(self) -> None:
        """Let everything go that waits; harmless where the server is gone."""
        with contextlib.suppress(OSError, ValueError):
            self._order("open_all_gates")

    def kill(self) -> None:
        """End the server: every read that waits for it fails."""
        self._server.kill()
        self._server.wait()

    def _order(self, what: str, **arguments: Any) -> Any:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps([what, arguments]) + "\n")
        self._server.stdin.flush()
        return json.loads(self._server.stdout.readline())


@contextlib.contextmanager
def serve_faulty_files(place: Path, *, in_background: int = 64) -> Iterator[FaultyFiles | str]:
    """Mount and serve a file system on a folder; gives the reason where that is refused.

    The kernel sends up to `in_background` direct reads at once for which nobody waits
    (FUSE_ASYNC_DIO); where it is 0, whoever asks for a direct read waits for it.
    """
    place.mkdir(parents=True, exist_ok=True)
    server = subprocess.Popen(
        [sys.executable, __file__, str(place), str(in_background)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    files = FaultyFiles(place, server)
    try:
        assert server.stdout is not None
        refusal = json.loads(server.stdout.readline() or '"the server ended"')
        yield refusal or files
    finally:
        # First the server, so that nothing below can wait for it.
        files.kill()
        for pipe in (server.stdin, server.stdout):
            with contextlib.suppress(OSError):
                pipe.close()  # type: ignore[union-attr]
        ctypes.CDLL(None).umount2(os.fsencode(place), 2)  # MNT_DETACH


# --- the server's side ---


@dataclass
class File:
    """A file and what is wrong with it.

    Attributes
    ----------
    size : int
        What the file system says.
    real : int, optional
        Where reads end; by default at `size`.
    most : int, optional
        Most bytes that one read brings.
    number : int
        The errno of reads that touch the byte `at`; 0 for none.
    at : int
    times : int
        How many reads fail; all of them where negative.
    refuses_direct : bool
        Whether open(2) with O_DIRECT is refused.
    cached : bool
        Whether the kernel's page cache stands before the server.
    knows_size : bool
        Whether the kernel asks for the size once only.
    """

    size: int
    real: int | None = None
    most: int | None = None
    number: int = 0
    at: int = 0
    times: int = -1
    refuses_direct: bool = False
    cached: bool = False
    knows_size: bool = False
    reads: list[tuple[int, int]] = field(default_factory=list)
    interrupts: int = 0
    closed: set[str] = field(default_factory=set)
    held: list[tuple[int, str, Callable[[], None]]] = field(default_factory=list)

    def read(self, offset: int, nbytes: int) -> bytes | int:
        """Return what a read brings, or an errno."""
        if self.number and self.times and offset <= self.at < offset + nbytes:
            self.times -= 1
            return self.number
        end = min(offset + nbytes, self.size if self.real is None else self.real)
        if self.most is not None:
            end = min(end, offset + self.most)
        return content(offset, max(end, offset))


class Server:
    """Answers the kernel and the test, one request at a time; never waits for one of the two.

    Parameters
    ----------
    device : int
        Descriptor of /dev/fuse.
    in_background : int
        See `serve_faulty_files`.
    """

    def __init__(self, device: int, in_background: int) -> None:
        self._device = device
        self._in_background = in_background
        self._files: dict[str, File] = {}
        self._numbers: dict[str, int] = {}

    def run(self) -> None:
        """Serve until the test goes away or the file system is gone."""
        orders = b""
        while True:
            ready, _, _ = select.select([self._device, 0], [], [])
            if 0 in ready:
                got = os.read(0, 1 << 16)
                if not got:
                    return
                *lines, orders = (orders + got).split(b"\n")
                for line in lines:
                    signal.alarm(ALARM_SECONDS)
                    what, arguments = json.loads(line)
                    print(json.dumps(getattr(self, what)(**arguments)), flush=True)
            if self._device in ready:
                try:
                    message = os.read(self._device, _BUFFER_BYTES)
                except OSError as error:
                    if error.errno == errno.ENODEV:
                        return
                    if error.errno in (errno.EINTR, errno.EAGAIN, errno.ENOENT):
                        continue
                    raise
                self._serve(message)

    # Orders.

    def add(self, name: str, **given: Any) -> None:
        self._numbers[name] = self._numbers.get(name, len(self._numbers) + _ROOT + 1)
        self._files[name] = File(**given)

    def gate(self, name: str, of: str, closed: bool) -> None:
        file = self._files[name]
        if closed:
            file.closed.add(of)
            return
        file.closed.discard(of)
        passing = [answer for _, at, answer in file.held if at == of]
        file.held = [entry for entry in file.held if entry[1] != of]
        for answer in passing:
            answer()

    def open_all_gates(self) -> None:
        for name in self._files:
            for of in ("reads", "sizes"):
                self.gate(name, of, False)

    def seen(self, name: str) -> dict[str, Any]:
        file = self._files[name]
        held = [at for _, at, _ in file.held]
        return {"reads": file.reads, "held": held, "interrupts": file.interrupts}

    # Requests of the kernel.

    def _serve(self, message: bytes) -> None:
        _, code, unique, node = struct.unpack_from("<IIQQ", message)
        body = message[40:]
        if code in (_FORGET, _BATCH_FORGET):
            return
        if code == _INTERRUPT:
            self._interrupt(*struct.unpack_from("<Q", body))
        elif code == _INIT:
            most = self._in_background
            flags = struct.unpack_from("<4I", body)[3]
            flags &= _ASYNC_READ | (_ASYNC_DIO if most else 0)
            given = (_MAJOR, _MINOR, 1 << 17, flags, most, most, 4096, 1, 0, 0, 0)
            self._answer(unique, struct.pack("<4IHHIIHHI28x", *given))
        elif code == _STATFS:
            self._answer(unique, struct.pack("<5Q4I24x", 0, 0, 0, 0, 0, 4096, 255, 4096, 0))
        elif code == _LOOKUP:
            self._lookup(unique, body.rstrip(b"\0").decode())
        elif code == _GETATTR and node == _ROOT:
            self._answer(unique, struct.pack("<QII", 1, 0, 0) + _attributes(_ROOT, None))
        elif code == _GETATTR:
            self._at_gate(unique, node, "sizes", lambda: self._size(unique, node))
        elif code == _OPEN:
            file = self._file(node)
            if file.refuses_direct and struct.unpack_from("<I", body)[0] & os.O_DIRECT:
                self._refuse(unique, errno.EINVAL)
            else:
                flags = 0 if file.cached else _FOPEN_DIRECT_IO
                self._answer(unique, struct.pack("<QII", node, flags, 0))
        elif code == _READ:
            _, offset, nbytes = struct.unpack_from("<QQI", body)
            self._file(node).reads.append((offset, nbytes))
            self._at_gate(unique, node, "reads", lambda: self._read(unique, node, offset, nbytes))
        elif code in (_RELEASE, _FLUSH, _DESTROY):
            self._answer(unique, b"")
        else:
            self._refuse(unique, errno.ENOSYS)

    def _file(self, node: int) -> File:
        (name,) = [name for name, number in self._numbers.items() if number == node]
        return self._files[name]

    def _at_gate(self, unique: int, node: int, of: str, answer: Callable[[], None]) -> None:
        file = self._file(node)
        if of in file.closed:
            file.held.append((unique, of, answer))
        else:
            answer()

    def _interrupt(self, unique: int) -> None:
        for file in self._files.values():
            for entry in [entry for entry in file.held if entry[0] == unique]:
                file.held.remove(entry)
                file.interrupts += 1
                self._refuse(unique, errno.EINTR)

    def _lookup(self, unique: int, name: str) -> None:
        if name not in self._files:
            self._refuse(unique, errno.ENOENT)
            return
        file, number = self._files[name], self._numbers[name]
        entry = struct.pack("<4QII", number, 0, 0, 3600 * file.knows_size, 0, 0)
        self._answer(unique, entry + _attributes(number, file.size))

    def _size(self, unique: int, node: int) -> None:
        file = self._file(node)
        valid = struct.pack("<QII", 3600 * file.knows_size, 0, 0)
        self._answer(unique, valid + _attributes(node, file.size))

    def _read(self, unique: int, node: int, offset: int, nbytes: int) -> None:
        got = self._file(node).read(offset, nbytes)
        if isinstance(got, int):
            self._refuse(unique, got)
        else:
            self._answer(unique, got)

    def _answer(self, unique: int, body: bytes) -> None:
        self._write(struct.pack("<IiQ", 16 + len(body), 0, unique) + body)

    def _refuse(self, unique: int, number: int) -> None:
        self._write(struct.pack("<IiQ", 16, -number, unique))

    def _write(self, message: bytes) -> None:
        # ENOENT: whoever asked was interrupted and is gone.
        with contextlib.suppress(FileNotFoundError):
            os.write(self._device, message)


def _attributes(number: int, size: int | None) -> bytes:
    """Pack struct fuse_attr: of a file, or where there is no size of the folder."""
    mode = stat.S_IFDIR | 0o755 if size is None else stat.S_IFREG | 0o444
    nbytes = size or 0
    words = (number, nbytes, -(-nbytes // 512), 0, 0, 0)
    return struct.pack("<6Q10I", *words, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0)


def main(place: str, in_background: str) -> None:
    """Mount, say so, and serve; the process that `serve_faulty_files` starts."""
    signal.alarm(ALARM_SECONDS)
    try:
        device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        print(json.dumps(str(error)), flush=True)
        return
    libc = ctypes.CDLL(None, use_errno=True)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other".encode()
    if libc.mount(b"gpuq", os.fsencode(place), b"fuse", _MS_NOSUID_NODEV, options) != 0:
        number = ctypes.get_errno()
        print(json.dumps(f"a FUSE mount is refused here: {os.strerror(number)}"), flush=True)
        return
    print(json.dumps(""), flush=True)
    Server(device, int(in_background)).run()


if __name__ == "__main__":
    main(*sys.argv[1:])
