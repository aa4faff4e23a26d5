"""Run a configuration through all its schedules, or one of them again."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from random import Random
from types import SimpleNamespace
from typing import Any

from gpuq.testing.explore.machine import stand_ins
from gpuq.testing.explore.rebinding import Code, Edit
from gpuq.testing.explore.schedule import (
    Bounds,
    Finding,
    Outcome,
    ScenarioError,
    World,
    advance,
    decode,
    encode,
)
from gpuq.testing.explore.stage import Stage

_THRESHOLDS = (100_000, 10, 10)
"""Of the garbage collector: about a hundred runs between collections."""


@dataclass(frozen=True)
class Configuration:
    """A small system whose schedules are searched.

    Attributes
    ----------
    name : str
    build : callable
        Spawns the fibers of a `Stage`; may return a check for the end of a schedule.
    bounds, long_bounds : Bounds
        Of the search in every test run, and of the long form.
    stage : dict
        Parameters of `Stage`.
    constants : dict
        Other values for constants of the product, ``module.NAME``.
    """

    name: str
    build: Callable[[Stage], Callable[[], None] | None]
    bounds: Bounds
    long_bounds: Bounds
    stage: dict[str, Any] = field(default_factory=dict)
    constants: dict[str, Any] = field(default_factory=dict)


class Explorer:
    """One configuration over the product's code, or over a mutant of it."""

    def __init__(self, configuration: Configuration, edits: Iterable[Edit] = ()) -> None:
        self.configuration = configuration
        self.world = World()
        self.operations = stand_ins(self.world)
        self.code = Code(self.operations, edits, configuration.constants)
        self._ops = SimpleNamespace(**self.operations)

    def run(
        self, path: list[int], bounds: Bounds, trace: list[str] | None = None
    ) -> tuple[Finding | None, dict[str, int]]:
        """Run one schedule; return what is wrong with it, and its notes."""
        world = self.world
        world.begin(path, bounds, trace)
        stage = Stage(world, self.code, self._ops, **self.configuration.stage)
        check = self.configuration.build(stage)
        try:
            world.run()
            stage.finish()
            if check is not None:
                check()
        except ScenarioError:
            raise
        except Exception as error:
            return Finding(encode(path, bounds), type(error).__name__, str(error)), stage.notes
        finally:
            world.end()
        return None, stage.notes

    def search(self, bounds: Bounds, most: int | None = None) -> Outcome:
        """Run all schedules within the bounds, at most `most`, up to the first finding."""
        outcome = Outcome(self.configuration.name)
        path: list[int] = []
        with _counted(outcome):
            while most is None or outcome.schedules < most:
                outcome.schedules += 1
                if self._finds(outcome, path, bounds):
                    break
                if not advance(path, self.world.widths):
                    outcome.is_complete = True
                    break
        return outcome

    def sample(self, bounds: Bounds, runs: int, seed: int = 0) -> Outcome:
        """Run random schedules within the bounds, up to the first finding."""
        outcome = Outcome(self.configuration.name)
        different = set()
        self.world.random = Random(seed)
        with _counted(outcome):
            for _ in range(runs):
                path: list[int] = []
                found = self._finds(outcome, path, bounds)
                different.add(tuple(path))
                if found:
                    break
        self.world.random = None
        outcome.schedules = outcome.sampled = len(different)
        return outcome

    def find(self, bounds: Bounds, most: int) -> Outcome:
        """Search for one finding, fewest preemptions first: where there is one, it comes soon."""
        schedules = 0
        for preemptions in range(bounds.preemptions + 1):
            outcome = self.search(replace(bounds, preemptions=preemptions), most)
            schedules += outcome.schedules
            if outcome.finding is not None:
                break
        outcome.schedules = schedules
        return outcome

    def replay(self, seed: str) -> tuple[Finding | None, list[str]]:
        """Run the schedule of a seed again; return what is wrong with it, and its steps."""
        trace: list[str] = []
        path, bounds = decode(seed)
        finding, _ = self.run(path, bounds, trace)
        return finding, trace

    def _finds(self, outcome: Outcome, path: list[int], bounds: Bounds) -> bool:
        """Run a schedule and enter it into the outcome; say whether something is wrong with it."""
        outcome.finding, notes = self.run(path, bounds)
        outcome.steps += self.world.steps
        outcome.note(notes)
        return outcome.finding is not None


@contextmanager
def _counted(outcome: Outcome) -> Iterator[None]:
    """Enter the time of many runs into an outcome, and let them be quick.

    Each run leaves cycles behind; what was there before need not be walked to find them.
    """
    start = time.process_time()
    gc.collect()
    gc.freeze()
    thresholds = gc.get_threshold()
    gc.set_threshold(*_THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()
        outcome.seconds = time.process_time() - start
