"""Machines that are hard to come by, made for a test: filtered system calls, limits, file systems.

Everything here undoes itself. What a machine forbids (mounts need root) skips the test, with the
machine's own words as the reason.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

CAP_FILES = (1, 2)
"""CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH: without them root obeys the modes of files."""
CAP_IPC_LOCK = 14

_PR_SET_NO_NEW_PRIVS = 38
_PR_SET_SECCOMP = 22
_SECCOMP_MODE_FILTER = 2
_SECCOMP_RET_ALLOW = 0x7FFF0000
_SECCOMP_RET_ERRNO = 0x00050000
_LOAD_WORD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_LINUX_CAPABILITY_VERSION_3 = 0x20080522
_NUMBER_AT, _ARCHITECTURE_AT = 0, 4

_MACHINES = {
    # machine: (AUDIT_ARCH, numbers of system calls)
    "x86_64": (0xC000003E, {"statx": 332, "preadv": 295, "pread64": 17, "memfd_create": 319}),
    "aarch64": (0xC00000B7, {"statx": 291, "preadv": 69, "pread64": 67, "memfd_create": 279}),
}
_EVERYWHERE = {"io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427}

TESTS = str(Path(__file__).parent)


# --- system calls that are refused ---


def refuse_calls(calls: Mapping[str, int]) -> None:
    """Let system calls fail with an errno from now on, in this process and all that it starts.

    There is no way back; see `run_python` for doing it in a subprocess. Needs no privilege.
    """
    machine, numbers = _MACHINES[os.uname().machine]
    numbers = numbers | _EVERYWHERE
    program = [
        (_LOAD_WORD, 0, 0, _ARCHITECTURE_AT),
        (_JUMP_IF_EQUAL, 1, 0, machine),
        (_RETURN, 0, 0, _SECCOMP_RET_ALLOW),
        (_LOAD_WORD, 0, 0, _NUMBER_AT),
    ]
    for name, number in calls.items():
        program.append((_JUMP_IF_EQUAL, 0, 1, numbers[name]))
        program.append((_RETURN, 0, 0, _SECCOMP_RET_ERRNO | number))
    program.append((_RETURN, 0, 0, _SECCOMP_RET_ALLOW))
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))
    description = struct.pack("HxxxxxxQ", len(program), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    word = ctypes.c_ulong
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, word(1), word(0), word(0), word(0)) != 0:
        raise OSError(ctypes.get_errno(), "PR_SET_NO_NEW_PRIVS")
    if libc.prctl(_PR_SET_SECCOMP, word(_SECCOMP_MODE_FILTER), description, word(0), word(0)) != 0:
        raise OSError(ctypes.get_errno(), "PR_SET_SECCOMP")


def drop_capabilities(numbers: Sequence[int]) -> None:
    """Go without capabilities from now on (capset(2)), in this thread and those it starts."""
    header = (ctypes.c_uint32 * 2)(_LINUX_CAPABILITY_VERSION_3, 0)
    words = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; twice
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.capget(header, words) != 0:
        raise OSError(ctypes.get_errno(), "capget")
    for number in numbers:
        for kind in range(3):
            words[number // 32 * 3 + kind] &= ~(1 << number % 32)
    if libc.capset(header, words) != 0:
        raise OSError(ctypes.get_errno(), "capset")


def run_python(
    snippet: str,
    *arguments: object,
    refused: Mapping[str, int] | None = None,
    limits: Mapping[str, int] | None = None,
    environment: Mapping[str, str | None] | None = None,
    dropped: Sequence[int] = (),
    before: str = "",
    timeout: float = 120,
) -> subprocess.CompletedProcess[str]:
    """Run Python code in a process of its own, on a machine that is made worse first.

    Parameters
    ----------
    snippet : str
        May import what stands in `tests`.
    *arguments
        ``sys.argv[1:]``.
    refused : mapping of str to int
        System calls that fail, and their errno: ``{"io_uring_setup": errno.EPERM}``.
    limits : mapping of str to int
        Names of `resource`, soft and hard in one: ``{"RLIMIT_NOFILE": 16}``.
    environment : mapping of str to str or None
        Variables to set, or with None to remove.
    dropped : sequence of int
        Capabilities (capabilities(7)) that root goes without, such as `CAP_IPC_LOCK`.
    before : str
        Shell commands that run first, as root in a mount namespace of their own: what they mount
        is gone with the process.
    timeout : float
        Seconds; reaching it fails the test.
    """
    prelude = f"import sys; sys.path.insert(0, {TESTS!r}); import system\n"
    for name, value in (limits or {}).items():
        prelude += f"import resource; resource.setrlimit(resource.{name}, ({value}, {value}))\n"
    if dropped:
        prelude += f"system.drop_capabilities({list(dropped)!r})\n"
    if refused:
        prelude += f"system.refuse_calls({dict(refused)!r})\n"
    command = [sys.executable, "-c", prelude + snippet, *map(str, arguments)]
    if before:
        need_mounts()
        command = ["unshare", "-m", "sh", "-euc", f'{before}\nexec "$@"', "sh", *command]
    variables = dict(os.environ)
    for name, text in (environment or {}).items():
        variables.pop(name, None)
        if text is not None:
            variables[name] = text
    return subprocess.run(
        command, env=variables, capture_output=True, text=True, timeout=timeout, check=False
    )


# --- file systems ---


class TriedFileSystems:
    """Which file systems were tried and which were not; printed at the end of the run."""

    def __init__(self) -> None:
        self.tried: list[str] = []
        self.skipped: dict[str, str] = {}

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        skipped = [f"{kind} ({reason})" for kind, reason in self.skipped.items()]
        terminalreporter.write_line(
            f"file systems tried: {', '.join(self.tried) or 'none'}; "
            f"skipped: {', '.join(skipped) or 'none'}"
        )


@contextlib.contextmanager
def noted_try(config: pytest.Config, kind: str) -> Iterator[None]:
    """Note that a file system is made inside, or why that is skipped."""
    name = TriedFileSystems.__name__
    noted = config.pluginmanager.get_plugin(name)
    if noted is None:
        noted = TriedFileSystems()
        config.pluginmanager.register(noted, name)
    try:
        yield
    except pytest.skip.Exception as skip:
        noted.skipped[kind] = str(skip)
        raise
    noted.tried.append(kind)


def need_mounts() -> None:
    """Skip the test where this process may not mount; by trying."""
    with tempfile.TemporaryDirectory() as folder, mounted(Path(folder), "tmpfs", "none"):
        pass


@contextlib.contextmanager
def mounted(folder: Path, kind: str, source: object, options: str = "") -> Iterator[Path]:
    """Mount a file system on a folder, made where it is missing; skip where that is refused."""
    folder.mkdir(parents=True, exist_ok=True)
    extra = ["-o", options] if options else []
    _run_or_skip("mount", "-t", kind, *extra, source, folder)
    try:
        yield folder
    finally:
        _unmount(folder)


@contextlib.contextmanager
def loop_device(image: Path, sector_bytes: int = 512) -> Iterator[str]:
    """Attach a file as a block device with sectors of a size, and detach it again."""
    device = _run_or_skip("losetup", "--find", "--show", "--sector-size", sector_bytes, image)
    try:
        yield device
    finally:
        _run("losetup", "--detach", device)


@contextlib.contextmanager
def ext4(folder: Path, sector_bytes: int = 512, mebibytes: int = 16) -> Iterator[Path]:
    """Mount a fresh ext4 on a loop device below `folder`; give the place."""
    make = ("mkfs.ext4", "-q", "-F", "-b", "4096", "-O", "^has_journal")
    with _fresh(folder, "ext4", make, mebibytes, sector_bytes) as place:
        yield place


@contextlib.contextmanager
def xfs(folder: Path, mebibytes: int = 320) -> Iterator[Path]:
    """Mount a fresh xfs on a loop device below `folder`; give the place."""
    with _fresh(folder, "xfs", ("mkfs.xfs", "-q", "-f", "-K"), mebibytes) as place:
        yield place


@contextlib.contextmanager
def btrfs(folder: Path, options: str = "", mebibytes: int = 128) -> Iterator[Path]:
    """Mount a fresh btrfs on a loop device below `folder`; give the place."""
    make = ("mkfs.btrfs", "-q", "-f", "-K")
    with _fresh(folder, "btrfs", make, mebibytes, options=options) as place:
        yield place


@contextlib.contextmanager
def _fresh(
    folder: Path,
    kind: str,
    make: Sequence[str],
    mebibytes: int,
    sector_bytes: int = 512,
    options: str = "",
) -> Iterator[Path]:
    image = folder / f"{kind}.img"
    with image.open("wb") as file:
        file.truncate(mebibytes << 20)
    with loop_device(image, sector_bytes) as device:
        _run_or_skip(*make, device)
        with mounted(folder / kind, kind, device, options) as place:
            yield place


@contextlib.contextmanager
def compressed_squashfs(folder: Path, files: Mapping[str, bytes]) -> Iterator[Path]:
    """Mount a squashfs of `files` as mksquashfs makes it: compressed, tails in fragments."""
    content, image = folder / "content", folder / "squash.img"
    content.mkdir()
    for name, data in files.items():
        (content / name).write_bytes(data)
    _run_or_skip("mksquashfs", content, image, "-quiet", "-no-progress", "-processors", 1)
    with (
        loop_device(image) as device,
        mounted(folder / "squashfs", "squashfs", device, "ro") as place,
    ):
        yield place


@contextlib.contextmanager
def squashfs(folder: Path, files: Mapping[str, bytes]) -> Iterator[Path]:
    """Mount a squashfs that holds `files`; give the place."""
    image = folder / "squash.img"
    image.write_bytes(squashfs_image(files))
    with (
        loop_device(image) as device,
        mounted(folder / "squashfs", "squashfs", device, "ro") as place,
    ):
        yield place


@contextlib.contextmanager
def overlay(folder: Path, lower: Path) -> Iterator[Path]:
    """Mount an overlay over `lower`, what is written going to `folder`; give the place."""
    upper, work = folder / "upper", folder / "work"
    for made in (upper, work):
        made.mkdir()
    options = f"lowerdir={lower},upperdir={upper},workdir={work}"
    with mounted(folder / "overlay", "overlay", "overlay", options) as place:
        yield place


def squashfs_image(files: Mapping[str, bytes]) -> bytes:
    """Return a squashfs 4.0 with files in its root folder, nothing compressed.

    Enough for a handful of files; see the kernel's Documentation/filesystems/squashfs.rst. It is
    written here because mksquashfs is rarely installed.
    """
    block_bytes, header_bytes = 1 << 17, 96
    uncompressed, none = 1 << 24, 0xFFFFFFFFFFFFFFFF
    data, inodes, listing = bytearray(), bytearray(), bytearray()
    for number, (name, content) in enumerate(sorted(files.items()), start=2):
        offset = len(inodes)
        # Kind 2, a file: mode, uid, gid, time, number, first block, no fragment, size, blocks.
        inodes += struct.pack("<4H2I", 2, 0o644, 0, 0, 0, number)
        inodes += struct.pack("<4I", header_bytes + len(data), 0xFFFFFFFF, 0, len(content))
        for start in range(0, len(content), block_bytes):
            block = content[start : start + block_bytes]
            inodes += struct.pack("<I", len(block) | uncompressed)
            data += block
        listing += struct.pack("<HhHH", offset, number - 2, 2, len(name) - 1) + name.encode()
    listing = bytearray(struct.pack("<3I", len(files) - 1, 0, 2)) + listing
    root = len(inodes)
    # Kind 1, a folder: ..., its block, links, bytes of the listing + 3, its offset, the parent.
    inodes += struct.pack("<4H2I", 1, 0o755, 0, 0, 0, 1)
    inodes += struct.pack("<IIHHI", 0, 2, len(listing) + 3, 0, len(files) + 2)

    inode_table = header_bytes + len(data)
    directory_table = inode_table + 2 + len(inodes)
    ids = directory_table + 2 + len(listing)
    end = ids + 2 + 4 + 8
    # Magic, inodes, time, bytes of a block, fragments, zlib, log2 of a block, all flags of
    # "uncompressed" and "none", ids, version 4.0.
    header = struct.pack("<5I", 0x73717368, len(files) + 1, 0, block_bytes, 0)
    header += struct.pack("<6H", 1, 17, 0x1 | 0x2 | 0x8 | 0x10 | 0x200, 1, 4, 0)
    header += struct.pack("<8Q", root, end, ids + 6, none, inode_table, directory_table, none, none)
    image = header + data + _metadata(inodes) + _metadata(listing)
    image += _metadata(struct.pack("<I", 0)) + struct.pack("<Q", ids)
    return image + bytes(-len(image) % 4096)


def _metadata(content: bytes) -> bytes:
    assert len(content) <= 8192
    return struct.pack("<H", len(content) | 0x8000) + bytes(content)


def _unmount(folder: Path) -> None:
    try:
        _run("umount", folder)
    except subprocess.CalledProcessError:
        _run("umount", "--lazy", folder)
        raise


def _run(*command: object) -> str:
    words = [str(word) for word in command]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.strip()


def _run_or_skip(*command: object) -> str:
    try:
        return _run(*command)
    except FileNotFoundError:
        pytest.skip(f"{command[0]} is not installed")
    except subprocess.CalledProcessError as error:
        said = error.stderr.strip().partition("\n")[0]
        pytest.skip(f"{command[0]} is refused here: {said or error}")
