"""Every deliberate fault is seen by the explorer, which sees none in the product itself."""

from __future__ import annotations

import functools
from concurrent.futures import Future

import pytest
from beside import pool, print_at_the_end
from mutants import MUTANTS, Mutant
from searching import find

from gpuq.testing.explore import CONFIGURATIONS, Edit, Explorer, MutationError, Outcome

LEAST_MUTANTS = 15


class Hunt:
    """Searches of mutants: all that will be asked for begin at once."""

    def __init__(self, mutants: list[Mutant]) -> None:
        self.killed: dict[str, Outcome] = {}
        self.survivors: list[str] = []
        self._futures: dict[str, list[Future[Outcome]]] = {
            mutant.name: [pool().submit(find, name, mutant.edits) for name in mutant.configurations]
            for mutant in mutants
        }

    def outcome(self, mutant: Mutant) -> Outcome:
        """Return the first search that shows a mutant's fault, or the last one."""
        for future in self._futures[mutant.name]:
            outcome = future.result()
            if outcome.finding is not None:
                self.killed[mutant.name] = outcome
                return outcome
        self.survivors.append(mutant.name)
        return outcome

    def summary(self) -> list[str]:
        """Say who was killed."""
        hunted = len(self.killed) + len(self.survivors)
        lines = [f"mutants killed: {len(self.killed)} of {hunted}"] if hunted else []
        return lines + [f"  survived: {name}" for name in self.survivors]


@functools.cache
def hunt_of(session: pytest.Session) -> Hunt:
    asked = [
        item.callspec.params["mutant"]
        for item in session.items
        if "hunt" in getattr(item, "fixturenames", ()) and hasattr(item, "callspec")
    ]
    hunt = Hunt(asked)
    print_at_the_end(session.config, "mutants", hunt.summary)
    return hunt


def begin_beside(session: pytest.Session) -> None:
    hunt_of(session)


@pytest.fixture(scope="module")
def hunt(request: pytest.FixtureRequest) -> Hunt:
    return hunt_of(request.session)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_every_mutant_is_killed(mutant: Mutant, hunt: Hunt) -> None:
    outcome = hunt.outcome(mutant)
    print(f"{mutant.name}: {outcome}")
    assert outcome.finding is not None, f"nothing sees that {mutant.name}"
    # It is the fault that is seen, not that the mutant's text is no program.
    assert outcome.finding.kind not in ("NameError", "TypeError", "AttributeError", "SyntaxError")


def test_mutants_are_many_and_each_has_a_name() -> None:
    assert len(MUTANTS) >= LEAST_MUTANTS
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    assert len({mutant.edits for mutant in MUTANTS}) == len(MUTANTS)


def test_the_product_passes_where_mutants_fail() -> None:
    """`test_explore` searches the product in all configurations, with the same bounds."""
    for mutant in MUTANTS:
        assert set(mutant.configurations) <= set(CONFIGURATIONS)


@pytest.mark.parametrize(
    ("edit", "complaint"),
    [
        (Edit("queue.claim_marked", "no such text", ""), "0 times"),
        (Edit("queue.claim_marked", "ticket", ""), "times, not once"),
        (Edit("queue.no_such_function", "a", "b"), "no such function"),
    ],
)
def test_a_mutant_that_no_longer_fits_is_an_error(edit: Edit, complaint: str) -> None:
    with pytest.raises(MutationError, match=complaint):
        Explorer(CONFIGURATIONS["pull, 1 slot"], [edit])
