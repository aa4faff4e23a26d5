"""The settings of a `Loader`: validated once, then frozen."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields, replace
from typing import Any

from gpuq.errors import ConfigError
from gpuq.layout import MAX_CAPACITY

TARGETS = ("auto", "cuda", "simulator", "cpu")
READERS = ("auto", "io_uring", "threads")
DIRECT_MODES = ("auto", "require", "off")

_PAGE = 4096
VARIABLES = {"target": "GPUQ_TARGET", "reader": "GPUQ_READER", "direct": "GPUQ_DIRECT"}


@dataclass(frozen=True)
class LoaderConfig:
    """Settings of a `Loader`.

    Attributes
    ----------
    target : {"auto", "cuda", "simulator", "cpu"}
        Where kernels run. "auto": the simulator under NUMBA_ENABLE_CUDASIM=1, else CUDA where a
        GPU is usable, else the CPU. Default from GPUQ_TARGET.
    reader : {"auto", "io_uring", "threads"}
        What reads. "auto": io_uring where a trial read with it succeeds, else threads. Default
        from GPUQ_READER.
    direct : {"auto", "require", "off"}
        Whether files are read with O_DIRECT; `Loader.open` can say otherwise for one file.
        Default from GPUQ_DIRECT.
    slots : int
        Requests outstanding at once; a power of two.
    staging_buffers : int
        Reads in flight at once.
    staging_bytes : int
        Bytes of one staging buffer, a multiple of 4096. A read that needs no buffer brings up to
        eight times as much, at most 4 MiB, through the page cache up to 32 times, at most 16 MiB;
        any other no more.
    merge_bytes : int
        The most bytes that are read at once for neighbouring requests; 0: each is read alone.
    straight_bytes : int
        The least that is read straight into a destination in host memory, where file offset and
        address have the same place in a block; 0: everything is staged.
    sources, destinations : int
        How many may be open at once.
    counters : int
        How many `Loader.counter` gives out.
    reader_threads : int
        Workers of the threads reader.
    trace : int
        Records of the trace that are kept until they are taken, see `Loader.trace`; 0: no trace.
    post_timeout_ns : int
        How long `gpuq.post` waits for a free slot, in nanoseconds.

    Raises
    ------
    ConfigError
        A value is out of its range; the message names the setting and what it may be.
    """

    target: str = "auto"
    reader: str = "auto"
    direct: str = "auto"
    slots: int = 1024
    staging_buffers: int = 128
    staging_bytes: int = 512 << 10
    merge_bytes: int = 64 << 10
    straight_bytes: int = 64 << 10
    sources: int = 1024
    destinations: int = 4096
    counters: int = 1024
    reader_threads: int = 16
    trace: int = 0
    post_timeout_ns: int = 10_000_000_000

    def __post_init__(self) -> None:
        self._one_of("target", TARGETS)
        self._one_of("reader", READERS)
        self._one_of("direct", DIRECT_MODES)
        self._between("slots", 1, MAX_CAPACITY)
        self._between("staging_buffers", 1, 1 << 15)
        self._between("staging_bytes", _PAGE, 1 << 30)
        self._between("merge_bytes", 0, 1 << 30)
        self._between("straight_bytes", 0, 1 << 62)
        self._between("sources", 1, 1 << 20)
        self._between("destinations", 1, 1 << 20)
        self._between("counters", 1, 1 << 16)
        self._between("reader_threads", 1, 1024)
        self._between("trace", 0, 1 << 26)
        self._between("post_timeout_ns", 0, 1 << 62)
        if self.slots & (self.slots - 1):
            raise ConfigError(f"slots must be a power of two, not {self.slots}")
        if self.staging_bytes % _PAGE:
            raise ConfigError(
                f"staging_bytes must be a multiple of {_PAGE}, not {self.staging_bytes}"
            )

    @classmethod
    def from_environment(cls, **settings: Any) -> LoaderConfig:
        """Build settings from keywords, then environment variables, then defaults.

        A keyword that is None counts as not given.

        Raises
        ------
        ConfigError
            A keyword is no setting, or a value is out of its range.
        """
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(settings) - known)
        if unknown:
            raise ConfigError(
                f"unknown setting {unknown[0]!r}; the settings are {', '.join(sorted(known))}"
            )
        given = {name: value for name, value in settings.items() if value is not None}
        for name, variable in VARIABLES.items():
            value = os.environ.get(variable)
            if name not in given and value:
                try:
                    replace(cls(), **{name: value})  # type: ignore[arg-type]
                except ConfigError as error:
                    raise ConfigError(f"{variable}: {error}") from None
                given[name] = value
        return cls(**given)

    def _one_of(self, name: str, allowed: tuple[str, ...]) -> None:
        value = getattr(self, name)
        if value not in allowed:
            raise ConfigError(f"{name} must be one of {', '.join(allowed)}, not {value!r}")

    def _between(self, name: str, least: int, most: int) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError(f"{name} must be an integer, not {value!r}")
        if not least <= value <= most:
            raise ConfigError(f"{name} must be between {least} and {most}, not {value}")
