"""The interleaving explorer: what it can see, and all schedules of the protocol within its bounds.

A finding prints a seed; ``python -m gpuq.testing.explore NAME SEED`` runs that schedule again.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from beside import print_at_the_end
from searching import Searches, asked_names

from gpuq import compiling
from gpuq.testing.explore import CONFIGURATIONS, Bounds, Configuration, Edit, Explorer
from gpuq.testing.explore.memory import Words, operations
from gpuq.testing.explore.rebinding import MODULES
from gpuq.testing.explore.schedule import Race, Violation, WaitsForever, World, advance

LEAST_SCHEDULES = 100_000
NO_BOUND = 99


@functools.cache
def searches_of(session: pytest.Session) -> Searches:
    searches = Searches(asked_names(session, "searches"))
    print_at_the_end(session.config, "explorer", searches.summary)
    return searches


def begin_beside(session: pytest.Session) -> None:
    searches_of(session)


@pytest.fixture(scope="module")
def searches(request: pytest.FixtureRequest) -> Searches:
    """The short form: complete within its bounds."""
    return searches_of(request.session)


@pytest.fixture(scope="module")
def long_searches(request: pytest.FixtureRequest) -> Searches:
    """The long form, which stops at a number of schedules."""
    searches = Searches(asked_names(request.session, "long_searches"), is_long=True)
    print_at_the_end(request.config, "explorer, long form", searches.summary)
    return searches


# --- what the explorer sees --------------------------------------------------------------------


def explore(build: Callable[..., Any], bounds: Bounds) -> list[Any]:
    """Run small fibers over two words through all schedules; return what each run brought.

    `build` is called with the operations, the words and a list for results, and returns the
    bodies of the fibers. A run brings the list, or the violation that it ended with.
    """
    world = World()
    ops = SimpleNamespace(**operations(world))
    brought: list[Any] = []
    path: list[int] = []
    while True:
        world.begin(path, bounds)
        words = Words(world, "words", [0, 0])
        results: list[Any] = []
        for number, body in enumerate(build(ops, words, results)):
            world.spawn(f"fiber{number}", body)
        try:
            world.run()
            brought.append(results)
        except Violation as violation:
            brought.append(violation)
        finally:
            world.end()
        if not advance(path, world.widths):
            return brought


@pytest.mark.parametrize("steps", [1, 2, 3, 4])
def test_without_a_bound_every_interleaving_of_two_fibers_runs_once(steps: int) -> None:
    def build(ops: Any, words: Words, order: list[int]) -> list[Any]:
        def body(number: int) -> None:
            for _ in range(steps):
                ops.load_relaxed(words, number)
                order.append(number)

        return [lambda: body(0), lambda: body(1)]

    orders = [tuple(order) for order in explore(build, Bounds(NO_BOUND, NO_BOUND))]
    assert len(set(orders)) == math.comb(2 * steps, steps)
    assert len(orders) == len(set(orders))


def test_a_bound_on_preemptions_leaves_the_schedules_with_fewer() -> None:
    def build(ops: Any, words: Words, order: list[int]) -> list[Any]:
        def body(number: int) -> None:
            for _ in range(3):
                ops.load_relaxed(words, number)
                order.append(number)

        return [lambda: body(0), lambda: body(1)]

    def changes(order: list[int]) -> int:
        return sum(a != b for a, b in itertools.pairwise(order))

    everything = {tuple(order) for order in explore(build, Bounds(NO_BOUND, NO_BOUND))}
    for bound in range(4):
        orders = {tuple(order) for order in explore(build, Bounds(bound, NO_BOUND))}
        # The change behind a fiber's last step is no preemption.
        assert {order for order in everything if changes(order) <= bound} <= orders
        assert all(changes(order) <= bound + 1 for order in orders)


MESSAGES = [
    # store, load, whether the message is read in order
    ("store_release", "load_acquire", True),
    ("store_release_device", "load_acquire_device", True),
    ("store_relaxed", "load_acquire", False),
    ("store_release", "load_relaxed", False),
    ("store_relaxed", "load_relaxed", False),
]


@pytest.mark.parametrize(("store", "load", "is_ordered"), MESSAGES)
def test_a_message_passed_without_release_and_acquire_is_a_race(
    store: str, load: str, is_ordered: bool
) -> None:
    def build(ops: Any, words: Words, seen: list[int]) -> list[Any]:
        def send() -> None:
            words[0] = 42
            getattr(ops, store)(words, 1, 1)

        def receive() -> None:
            if getattr(ops, load)(words, 1):
                seen.append(words[0])

        return [send, receive]

    runs = explore(build, Bounds(NO_BOUND, NO_BOUND))
    races = [run for run in runs if isinstance(run, Race)]
    assert bool(races) is not is_ordered
    # A race is a race also where the value was right: here it always is.
    assert all(run == [42] for run in runs if not isinstance(run, Race) and run)
    assert any(run == [42] for run in runs) is is_ordered


def test_a_plain_store_behind_a_release_is_a_race() -> None:
    def build(ops: Any, words: Words, seen: list[int]) -> list[Any]:
        def send() -> None:
            ops.store_release(words, 1, 1)
            words[0] = 42

        def receive() -> None:
            if ops.load_acquire(words, 1):
                seen.append(words[0])

        return [send, receive]

    assert any(isinstance(run, Race) for run in explore(build, Bounds(0, 0)))


def test_a_read_modify_write_carries_a_release_on() -> None:
    def build(ops: Any, words: Words, seen: list[int]) -> list[Any]:
        def send() -> None:
            words[0] = 42
            ops.fetch_add(words, 1, 1)

        def count() -> None:
            ops.fetch_add(words, 1, 1)

        def receive() -> None:
            if ops.load_acquire(words, 1) == 2:
                seen.append(words[0])

        return [send, count, receive]

    runs = explore(build, Bounds(NO_BOUND, NO_BOUND))
    assert not any(isinstance(run, Violation) for run in runs)
    assert [42] in runs


@pytest.mark.parametrize(("stale", "expected"), [(0, {(0, 1), (1, 0), (1, 1)}), (1, None)])
def test_both_sides_of_a_store_buffer_may_miss_each_other(
    stale: int, expected: set[tuple[int, int]] | None
) -> None:
    """Litmus test SB: release and acquire allow 0, 0; one order of all steps does not."""

    def build(ops: Any, words: Words, seen: list[Any]) -> list[Any]:
        def body(number: int) -> None:
            ops.store_release(words, number, 1)
            seen.append((number, ops.load_acquire(words, 1 - number)))

        return [lambda: body(0), lambda: body(1)]

    runs = explore(build, Bounds(NO_BOUND, NO_BOUND, stale=stale))
    values = {tuple(value for _, value in sorted(run)) for run in runs}
    assert values == (expected or {(0, 0), (0, 1), (1, 0), (1, 1)})


def test_read_modify_writes_of_one_word_close_the_store_buffer() -> None:
    def build(ops: Any, words: Words, seen: list[Any]) -> list[Any]:
        fence = Words(words._world, "fence", [0])

        def body(number: int) -> None:
            ops.store_relaxed(words, number, 1)
            ops.fetch_add(fence, 0, 1)
            seen.append((number, ops.load_relaxed(words, 1 - number)))

        return [lambda: body(0), lambda: body(1)]

    runs = explore(build, Bounds(NO_BOUND, NO_BOUND, stale=2))
    assert (0, 0) not in {tuple(value for _, value in sorted(run)) for run in runs}


def test_stale_loads_go_neither_back_nor_behind_what_is_known() -> None:
    """Litmus tests CoRR and MP: a word is never seen to go back, nor what a message says."""

    def build(ops: Any, words: Words, seen: list[Any]) -> list[Any]:
        def send() -> None:
            for value in (1, 2):
                ops.store_relaxed(words, 0, value)
            ops.store_release(words, 1, 1)

        def receive() -> None:
            first = ops.load_relaxed(words, 0)
            told = ops.load_acquire(words, 1)
            seen.append((first, told, ops.load_relaxed(words, 0)))

        return [send, receive]

    runs = explore(build, Bounds(NO_BOUND, NO_BOUND, stale=3))
    seen = {run[0] for run in runs}
    assert all(first <= last for first, _, last in seen)
    assert all(last == 2 for _, told, last in seen if told)
    assert (0, 0, 2) in seen
    assert (0, 0, 0) in seen


def test_device_scope_does_not_reach_the_host() -> None:
    world = World()
    ops = SimpleNamespace(**operations(world))
    for is_device in (True, False):
        world.begin([], Bounds(0, 0))
        words = Words(world, "words", [0])
        world.spawn("kernel", partial(ops.store_release_device, words, 0, 1), device=True)
        world.spawn("other", partial(ops.load_acquire, words, 0), device=is_device)
        if is_device:
            world.run()
        else:
            with pytest.raises(Race, match="does not reach the host"):
                world.run()
        world.end()


def test_who_waits_for_nobody_is_found_and_who_is_woken_is_not() -> None:
    def build(ops: Any, words: Words, _: list[Any]) -> list[Any]:
        def wait() -> None:
            while ops.load_acquire(words, 0) == 0:
                ops.relax(0)

        return [wait, lambda: ops.store_release(words, 0, 1)]

    assert all(run == [] for run in explore(build, Bounds(NO_BOUND, NO_BOUND)))

    def build_deaf(ops: Any, words: Words, _: list[Any]) -> list[Any]:
        return [build(ops, words, _)[0], lambda: ops.store_release(words, 1, 1)]

    runs = explore(build_deaf, Bounds(NO_BOUND, NO_BOUND))
    assert all(isinstance(run, WaitsForever) for run in runs)


def test_what_runs_is_the_products_own_code() -> None:
    code = Explorer(CONFIGURATIONS["split"]).code
    for module in MODULES:
        rebuilt = getattr(code, module.__name__.rpartition(".")[2])
        own = {
            name: getattr(value, "py_func", value)
            for name, value in vars(module).items()
            if getattr(value, "__module__", "") == module.__name__
        }
        functions = {n: f for n, f in own.items() if hasattr(f, "__code__")}
        assert functions, f"nothing of {module.__name__} runs"
        for name, function in functions.items():
            if function not in compiling._contracts:
                assert getattr(rebuilt, name).__code__ is function.__code__
                assert getattr(rebuilt, name).__globals__ is not vars(module)


def test_a_schedule_runs_again_from_its_seed() -> None:
    configuration = CONFIGURATIONS["pull, 1 slot"]
    bad = Edit("queue.claim_marked", "if is_free(q, turn, ticket):", "if turn <= ticket:")
    late = Edit("queue.consume", "status if as_signed(turn) == ticket else _STALE", "status")
    for edits in ((bad,), (late, bad)):
        explorer = Explorer(configuration, edits)
        outcome = explorer.search(Bounds(1, 1))
        assert outcome.finding is not None
        again = Explorer(configuration, edits)
        findings = [again.replay(outcome.finding.seed) for _ in range(2)]
        assert findings[0] == findings[1]
        assert findings[0][0] == outcome.finding
        assert any("submissions[0]" in step for step in findings[0][1])


def test_a_search_is_repeatable() -> None:
    configuration = CONFIGURATIONS["split"]
    outcomes = [Explorer(configuration).search(Bounds(1, 1)) for _ in range(2)]
    assert outcomes[0].is_complete
    assert replace(outcomes[0], seconds=0.0) == replace(outcomes[1], seconds=0.0)


def test_random_schedules_are_different_repeatable_and_find_what_is_wrong() -> None:
    configuration = CONFIGURATIONS["two waiters"]
    outcomes = [Explorer(configuration).sample(Bounds(5, 3), 100, seed=1) for _ in range(2)]
    assert replace(outcomes[0], seconds=0.0) == replace(outcomes[1], seconds=0.0)
    assert 50 < outcomes[0].sampled <= 100
    assert outcomes[0].finding is None

    late = Edit("queue.judge", "if sequence > ticket + 1:", "if False:")
    explorer = Explorer(configuration, [late])
    finding = explorer.sample(Bounds(5, 3), 5000).finding
    assert finding is not None
    assert finding.kind == "WaitsForever"
    assert explorer.replay(finding.seed)[0] == finding


# --- the protocol ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_every_schedule_keeps_every_property(name: str, searches: Searches) -> None:
    outcome = searches.outcome(name)
    assert outcome.finding is None, str(outcome)
    assert outcome.is_complete, str(outcome)


def test_at_least_so_many_schedules_ran(searches: Searches) -> None:
    """Over all configurations, unless only some of them were asked for."""
    if len(searches.ran) == len(CONFIGURATIONS):
        assert sum(outcome.schedules for outcome in searches.ran.values()) >= LEAST_SCHEDULES


REACHED = [
    # what a scenario is there for must happen in some of its schedules
    ("onlooker", "seen OK"),
    ("onlooker", "seen STALE"),
    ("try_post, few slots", "no slot"),
    ("post time-out", "timed out"),
    ("wait time-out", "timed out"),
    ("pieces, short reads", "faults"),
    ("straight", "faults"),
    ("straight, a broken one", "faults"),
    ("straight, closing", "OK"),
    ("straight, abort", "ABORTED"),
    ("straight, destination let go", "OK"),
    ("neighbours", "merged"),
    ("neighbours, faults", "merged"),
    ("neighbours, faults", "faults"),
    ("neighbours, end of file", "merged"),
    ("neighbours of two files", "merged"),
    ("neighbours, closing", "merged"),
    ("neighbours, abort", "merged"),
    ("copies that fail", "faults"),
    ("copies that are lost", "faults"),
    ("closing", "OK"),
    ("closing", "ABORTED"),
    ("abort", "OK"),
    ("abort", "ABORTED"),
    ("source closed", "OK"),
    ("source closed", "BAD_SOURCE"),
    ("destination let go", "OK"),
    ("destination let go", "BAD_DESTINATION"),
]


@pytest.mark.parametrize(("name", "what"), REACHED)
def test_the_schedules_reach_what_they_are_there_for(
    name: str, what: str, searches: Searches
) -> None:
    assert searches.outcome(name).notes.get(what, 0) > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_every_schedule_of_the_long_form_keeps_every_property(
    name: str, request: pytest.FixtureRequest
) -> None:
    if "slow" not in request.config.option.markexpr:
        pytest.skip("takes an hour; run it with -m slow")
    outcome = request.getfixturevalue("long_searches").outcome(name)
    assert outcome.finding is None, str(outcome)


def test_configurations_have_names_of_their_own_and_longer_long_forms() -> None:
    for name, configuration in CONFIGURATIONS.items():
        assert isinstance(configuration, Configuration)
        assert configuration.name == name
        short, long = configuration.bounds, configuration.long_bounds
        assert long.preemptions >= short.preemptions
        assert long.stale >= short.stale
        assert long != short
