"""Searches of the interleaving explorer, which begin before the tests that look at them."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import replace

import pytest
from beside import pool

from gpuq.testing.explore import CONFIGURATIONS, Edit, Explorer, Outcome

MOST_SCHEDULES_OF_LONG_FORM = 40_000
MOST_SCHEDULES_OF_MUTANT = 20_000
SAMPLES, SAMPLES_OF_LONG_FORM = 300, 20_000


def search(name: str, is_long: bool) -> Outcome:
    """Search a configuration; runs in a process of the pool."""
    configuration = CONFIGURATIONS[name]
    explorer = Explorer(configuration)
    bounds = configuration.long_bounds if is_long else configuration.bounds
    outcome = explorer.search(bounds, MOST_SCHEDULES_OF_LONG_FORM if is_long else None)
    if outcome.finding is None:
        # Beyond the bounds there are too many to run all.
        bounds = replace(configuration.long_bounds, preemptions=5, switches=3)
        outcome.add(explorer.sample(bounds, SAMPLES_OF_LONG_FORM if is_long else SAMPLES))
    return outcome


def find(name: str, edits: tuple[Edit, ...]) -> Outcome:
    """Search a mutant for what is wrong with it; runs in a process of the pool."""
    configuration = CONFIGURATIONS[name]
    return Explorer(configuration, edits).find(configuration.bounds, MOST_SCHEDULES_OF_MUTANT)


class Searches:
    """Searches of configurations: all that will be asked for begin at once.

    Parameters
    ----------
    names : iterable of str
    is_long : bool

    Attributes
    ----------
    ran : dict of str to Outcome
    """

    def __init__(self, names: Iterable[str], *, is_long: bool = False) -> None:
        self.ran: dict[str, Outcome] = {}
        self._futures: dict[str, Future[Outcome]] = {
            name: pool().submit(search, name, is_long) for name in names
        }

    def outcome(self, name: str) -> Outcome:
        """Wait for the outcome of a search."""
        if name not in self.ran:
            self.ran[name] = self._futures[name].result()
            print(self.ran[name])
        return self.ran[name]

    def summary(self) -> list[str]:
        """Say how much was searched."""
        if not self.ran:
            return []
        outcomes = self.ran.values()
        bounds = [CONFIGURATIONS[name].bounds.preemptions for name in self.ran]
        seconds = sum(outcome.seconds for outcome in outcomes)
        return [
            f"schedules explored: {sum(outcome.schedules for outcome in outcomes):,} "
            f"in {len(outcomes)} configurations, all with preemption bound {max(bounds)} or less "
            f"and {sum(outcome.sampled for outcome in outcomes):,} random ones beyond, "
            f"{sum(outcome.steps for outcome in outcomes):,} memory operations, "
            f"{seconds:.0f} s of processor time"
        ]


def asked_names(session: pytest.Session, fixture: str) -> list[str]:
    """Return the configurations that the selected tests ask a fixture for, in their order."""
    names = [
        item.callspec.params["name"]
        for item in session.items
        if fixture in getattr(item, "fixturenames", ()) and hasattr(item, "callspec")
    ]
    return list(dict.fromkeys(names))
