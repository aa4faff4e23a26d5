"""Files that are truncated, grown and replaced while kernels read them."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable

import numpy as np

from gpuq.soak.content import fill


class SoakFile:
    """One file, by number; its first `stable` bytes never change.

    Attributes
    ----------
    number : int
    path : str
    stable, most : int
        Bytes that always stand there, and that may.
    size : int
        Bytes now, where `changes` is even.
    changes : int
        Odd while the file is being changed. A reader who finds the same even number before and
        after knows what the file held meanwhile.
    """

    def __init__(self, number: int, path: str, stable: int, most: int) -> None:
        self.number = number
        self.path = path
        self.stable = stable
        self.most = most
        self.size = 0
        self.changes = 0
        # Beside the path and then over it, so that a reader never opens half a file.
        self._descriptor = os.open(f"{path}.new", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._write(0, most)
        os.replace(f"{path}.new", path)

    def _write(self, start: int, end: int) -> None:
        content = np.empty(end - start, dtype=np.uint8)
        fill(content, self.number, start)
        view = content.data
        while start < end:
            start += os.pwrite(self._descriptor, view[len(view) - (end - start) :], start)
        self.size = end

    def change(self, random_numbers: random.Random) -> str:
        """Cut the changing part at a random place, or grow it; return which."""
        size = random_numbers.randint(self.stable, self.most)
        self.changes += 1
        try:
            if size < self.size:
                os.ftruncate(self._descriptor, size)
                self.size = size
                return "files truncated"
            self._write(self.size, size)
            return "files grown"
        finally:
            self.changes += 1

    def close(self) -> None:
        """Change it no more; who has it open may read on."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class Folder:
    """Some files of different sizes in a folder; a path may come to name another file."""

    def __init__(self, place: str, count: int, largest: int, random_numbers: random.Random) -> None:
        self.lock = threading.Lock()
        self._place = place
        self._largest = largest
        self._numbers = 0
        self._random = random_numbers
        self.files = [self._make(i) for i in range(count)]

    def _make(self, index: int) -> SoakFile:
        self._numbers += 1
        most = self._random.choice([self._largest, self._largest // 7 + 513, 4096 * 3, 8191, 600])
        stable = self._random.randint(most // 2, most)
        return SoakFile(self._numbers, os.path.join(self._place, f"file{index}"), stable, most)

    def replace(self, index: int) -> None:
        """Let another file take a path; who has the old one open goes on reading that."""
        with self.lock:
            old, self.files[index] = self.files[index], self._make(index)
        old.close()

    def with_file(self, index: int, act: Callable[[SoakFile], None]) -> None:
        """Do something with the file that a path names, which stays until it is done."""
        with self.lock:
            act(self.files[index])

    def close(self) -> None:
        """Close all files."""
        for file in self.files:
            file.close()
