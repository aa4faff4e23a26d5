"""What changes everything under the kernels of the soak."""

from __future__ import annotations

import contextlib
import random
import threading
from typing import Any

from gpuq.errors import ClosedError

_NAPS = (0.0, 0.002, 0.01)


class Meddler:
    """A thread that changes everything under the kernels of a life."""

    def __init__(self, life: Any, seed: int) -> None:
        self.life = life
        self.random = random.Random(seed)
        self.error: BaseException | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="soak-meddler", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._stop.wait(self.random.choice(_NAPS)):
                with contextlib.suppress(ClosedError):
                    done = self._meddle()
                    self.life.soak.meddling[done] += 1
        except BaseException as error:
            self.error = error
            self.life.end("abort")

    def _meddle(self) -> str:
        life = self.life
        what = self.random.randrange(100)
        if what < 82:
            return str(self.random.choice(life.folder.files).change(self.random))
        if what < 90:
            life.folder.replace(self.random.randrange(len(life.folder.files)))
            return "files replaced"
        if what < 97:
            return self._reopen()
        if what < 99 or self.random.random() < 0.85:
            return self._register_again()
        how = self.random.choice(["close", "abort"])
        life.end(how)
        self._stop.set()
        return f"loaders ended by {how} under kernels"

    def _reopen(self) -> str:
        life, place = self.life, self.random.randrange(len(self.life.sources))
        old = life.sources[place]
        old.is_leaving = True
        old.source.close()
        new = life.open()
        with life.lock:
            life.sources[place] = new
            life.stale_sources.append(old.source.handle)
        return "sources closed under kernels"

    def _register_again(self) -> str:
        life, place = self.life, self.random.randrange(len(self.life.destinations))
        old = life.destinations[place]
        old.is_leaving = True
        old.destination.unregister()
        new = life.register(old.array)
        with life.lock:
            life.destinations[place] = new
            life.stale_destinations.append(old.destination.handle)
        return "destinations unregistered under kernels"

    def stop(self) -> None:
        """Wait for it to end; raise what it ended by."""
        self._stop.set()
        self._thread.join()
        if self.error is not None:
            raise self.error
