"""Which machine this is: what a figure means nothing without."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_PACKAGES = ("gpuq", "numba", "llvmlite", "numba-cuda", "numpy")
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Machine:
    """What was measured on.

    Attributes
    ----------
    cpu : str
    cores : int
        That this process may use.
    memory_bytes : int
    kernel : str
    file_system, device : str
        Of the directory that holds the file.
    versions : dict of str to str
    load : float
        Load average of the last minute, before.
    """

    cpu: str
    cores: int
    memory_bytes: int
    kernel: str
    file_system: str
    device: str
    versions: dict[str, str]
    load: float

    def __str__(self) -> str:
        versions = ", ".join(f"{name} {number}" for name, number in self.versions.items())
        return (
            f"{self.cpu}, {self.cores} cores, {self.memory_bytes / 2**30:.0f} GiB; "
            f"{self.kernel}; {self.file_system} on {self.device}; {versions}; load {self.load:.1f}"
        )


def describe_machine(directory: Path) -> Machine:
    """Describe this machine and what holds `directory`."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    fio = shutil.which("fio")
    if fio:
        answer = subprocess.run([fio, "--version"], capture_output=True, text=True, check=False)
        versions["fio"] = answer.stdout.strip().removeprefix("fio-")
    return Machine(
        cpu=_cpu_model(),
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        kernel=f"{platform.system()} {platform.release()} {platform.machine()}",
        file_system=_file_system(directory),
        device=_device(directory),
        versions=versions,
        load=round(os.getloadavg()[0], 2),
    )


def cpu_seconds_of_all() -> float:
    """Return the processor time that all processes of the machine have used."""
    with open("/proc/stat", encoding="ascii") as file:
        user, nice, system = (int(ticks) for ticks in file.readline().split()[1:4])
    return (user + nice + system) / _TICKS_PER_SECOND


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _device_number(directory: Path) -> str:
    number = os.stat(directory).st_dev
    return f"{os.major(number)}:{os.minor(number)}"


def _file_system(directory: Path) -> str:
    number = _device_number(directory)
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields, _, rest = line.partition(" - ")
        if fields.split()[2] == number:
            return rest.split()[0]
    return "unknown"


def _device(directory: Path) -> str:
    """Name the block device: the disk's own description where it has one."""
    node = Path("/sys/dev/block") / _device_number(directory)
    if not node.exists():
        return "no block device"
    node = node.resolve()
    disk = node if (node / "queue").exists() else node.parent
    about = [node.name]
    for file in ("device/model", "device/driver"):
        try:
            at = disk / file
            about.append(os.readlink(at).rpartition("/")[2] if at.is_symlink() else at.read_text())
        except OSError:
            continue
    return " ".join(part.strip() for part in about)
