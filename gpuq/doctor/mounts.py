"""Which file system a path is on, as the kernel lists it in /proc/self/mountinfo."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

_MOUNTINFO = "/proc/self/mountinfo"
_ESCAPE = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True)
class Mount:
    """One line of mountinfo.

    Attributes
    ----------
    number : int
        The mount's id.
    point : str
        Where it is mounted.
    kind : str
        The file system's type: ``"ext4"``, ``"fuse.sshfs"``.
    source : str
        What is mounted: a device, a share, or any word.
    is_read_only : bool
    """

    number: int
    point: str
    kind: str
    source: str
    is_read_only: bool


def parse_mountinfo(text: str) -> list[Mount]:
    """Return the mounts in their order (proc_pid_mountinfo(5)): the last of a place is on top."""
    mounts = []
    for line in text.splitlines():
        before, _, after = line.partition(" - ")
        number, _, _, _, point, options, *_ = before.split(" ")
        kind, source, super_options = after.split(" ")[:3]
        is_read_only = "ro" in options.split(",") or "ro" in super_options.split(",")
        mounts.append(Mount(int(number), _plain(point), kind, _plain(source), is_read_only))
    return mounts


def mount_of(path: str) -> Mount | None:
    """Return the mount that a path is on; None where the kernel does not say.

    By the id of the mount that opening it leads to, or else by the longest prefix: a mount that
    lies hidden under a later one has a longer prefix and is not it.

    Raises
    ------
    OSError
        There is no such path.
    """
    place = os.path.realpath(path, strict=True)
    try:
        with open(_MOUNTINFO, encoding="utf-8", errors="surrogateescape") as file:
            mounts = parse_mountinfo(file.read())
    except OSError:
        return None
    number = _mount_number(place)
    exact = (mount for mount in mounts if mount.number == number)
    return next(exact, None) or longest_prefix(mounts, place)


def longest_prefix(mounts: list[Mount], place: str) -> Mount | None:
    """Return the mount whose point is the longest prefix of a resolved path; the last if equal."""
    best = None
    for mount in mounts:
        is_above = place == mount.point or place.startswith(mount.point.rstrip("/") + "/")
        if is_above and (best is None or len(mount.point) >= len(best.point)):
            best = mount
    return best


def _mount_number(place: str) -> int | None:
    # O_PATH opens nothing: no permission is needed, and no pipe or device is touched.
    descriptor = os.open(place, os.O_PATH | os.O_CLOEXEC)
    try:
        with open(f"/proc/self/fdinfo/{descriptor}", encoding="ascii") as file:
            lines = dict(line.split(":", 1) for line in file if ":" in line)
    except OSError:
        return None
    finally:
        os.close(descriptor)
    number = lines.get("mnt_id", "").strip()
    return int(number) if number.isdecimal() else None


def _plain(escaped: str) -> str:
    return _ESCAPE.sub(lambda match: chr(int(match[1], 8)), escaped)
