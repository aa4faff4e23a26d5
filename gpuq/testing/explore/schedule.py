"""Fibers that hand over to each other at memory operations, and the search through all orders.

A schedule is the list of choices that one run made. The first run always takes choice 0, "go on
with who is running"; the next one repeats all but the last choice that had an alternative. Runs
repeat exactly, so a schedule is its own recipe: `encode` makes a seed of it.

Choices, and what bounds their number:

============  ====================================================================================
preemption    another fiber goes on in front of a memory operation; a budget per schedule
switch        another than the next one in the round goes on when a fiber waits or is over; a
              budget, and then that of preemptions
fault         what a model of the machine answers (short read, errno, late copy); a budget
stale load    an atomic load sees an older store that it may see; a budget
============  ====================================================================================

A spinning fiber calls `relax`. It sleeps until a word that it loaded since its last `relax` was
stored to by another fiber, so a spin costs one turn for each thing that can end it and a fiber
that nothing can wake is found out: "nobody waits forever" is a property like any other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from greenlet import GreenletExit, greenlet  # type: ignore[import-untyped]

MOST_FIBERS = 8
MOST_STEPS = 2000
"""Memory operations in one schedule; more means that somebody spins on and on."""
MOST_NUDGES = 24
"""Times that restless fibers are woken in one schedule although nothing changed for them."""
MOST_TICKS = 6
"""Times in one schedule that time passes because everybody waits."""

_ALL_OF_SETUP = 1 << 60
_DEVIATIONS = 0.04
"""Of random choices, which are 0 otherwise: a schedule has about a hundred."""


class Violation(AssertionError):
    """A property does not hold in this schedule."""


class Race(Violation):
    """Two accesses of a word, one of them plain, that nothing orders."""


class WaitsForever(Violation):
    """A fiber waits for what can no longer come."""


class ScenarioError(Exception):
    """The scenario is wrong, not what it explores."""


@dataclass(frozen=True)
class Bounds:
    """How far a search goes.

    Attributes
    ----------
    preemptions : int
        Times that a fiber is interrupted in a schedule.
    switches : int
        Times that another than the next fiber in the round goes on when one waits; more of them
        count as preemptions.
    faults : int
        Answers of the machine other than the usual one.
    stale : int
        Loads that see an older store.
    """

    preemptions: int = 1
    switches: int = 0
    faults: int = 0
    stale: int = 0


class Fiber:
    """A thread of a scenario.

    Attributes
    ----------
    number : int
        Its component in vector clocks.
    is_daemon : bool
        A schedule is over when all others are.
    is_fresh : bool
        It did nothing since it was chosen to go on.
    is_device : bool
        It runs in a kernel: its read-modify-writes reach no further than the device.
    clock : list of int
        What it has seen of each fiber.
    seen : dict
        The version in which it first loaded each word since its last `relax`.
    oldest : dict
        Per word, the oldest store that it may still see.
    work : object
        The scenario's: what it is doing.
    """

    __slots__ = (
        "blocks",
        "body",
        "clock",
        "greenlet",
        "is_daemon",
        "is_device",
        "is_fresh",
        "is_over",
        "is_ready",
        "name",
        "number",
        "oldest",
        "seen",
        "watched",
        "work",
    )

    def __init__(self, number: int, name: str, body: Callable[[], None] | None) -> None:
        self.number = number
        self.name = name
        self.body = body
        self.greenlet: Any = None
        self.is_daemon = False
        self.is_device = False
        self.is_ready = True
        self.is_fresh = True
        self.is_over = False
        self.blocks = 0
        self.clock = [0] * MOST_FIBERS
        self.clock[0] = _ALL_OF_SETUP
        self.clock[number] = 1
        self.seen: dict[Any, int] = {}
        self.watched: dict[Any, int] = {}
        self.oldest: dict[Any, int] = {}
        self.work: Any = None


class World:
    """One run at a time: its fibers, its choices, and who is running.

    Attributes
    ----------
    random : Random or None
        Makes the choices that the schedule does not; None: they are 0.
    """

    def __init__(self) -> None:
        self._main = greenlet.getcurrent()
        self.random: Random | None = None
        self.begin([], Bounds())

    def begin(self, path: list[int], bounds: Bounds, trace: list[str] | None = None) -> None:
        """Forget everything and start a run that makes the choices of `path` first."""
        self.path = path
        self.widths: list[int] = []
        self.preemptions = bounds.preemptions
        self.switches = bounds.switches
        self.faults = bounds.faults
        self.stale = bounds.stale
        self.has_stale = bounds.stale > 0
        self.steps = 0
        self.is_exploring = False
        self.trace = trace
        self.machine: Any = None
        self.time: Any = None  # words whose first one is the time; None where none passes
        self.tick: Callable[[], None] | None = None
        self.ticks = 0
        self.setup = Fiber(0, "setup", None)
        self.setup.clock = [0] * MOST_FIBERS
        self.current = self.setup
        self.fibers: list[Fiber] = []
        self._next: Fiber | None = None

    # --- choices ---

    def choose(self, options: int) -> int:
        """Return one of ``range(options)``; another search run returns another."""
        position = len(self.widths)
        self.widths.append(options)
        if position < len(self.path):
            choice = self.path[position]
            if choice >= options:
                raise ScenarioError("the schedule does not fit: a run does not repeat itself")
            return choice
        choice = 0
        if self.random is not None and self.random.random() < _DEVIATIONS:
            choice = self.random.randrange(options)
        self.path.append(choice)
        return choice

    def fault(self, options: int) -> int:
        """Return which answer the machine gives: 0 is the usual one, others use up a budget."""
        if self.faults <= 0 or options < 2 or not self.is_exploring:
            return 0
        choice = self.choose(options)
        if choice:
            self.faults -= 1
        return choice

    # --- scheduling ---

    def spawn(
        self,
        name: str,
        body: Callable[[], None],
        *,
        daemon: bool = False,
        device: bool = False,
    ) -> Fiber:
        """Add a fiber; `run` starts it."""
        number = len(self.fibers) + 1
        if number >= MOST_FIBERS:
            raise ScenarioError(f"more than {MOST_FIBERS - 1} fibers")
        fiber = Fiber(number, name, body)
        fiber.is_daemon = daemon
        fiber.is_device = device
        fiber.greenlet = greenlet(body, self._main)
        self.fibers.append(fiber)
        return fiber

    def point(self) -> None:
        """Let another fiber go on here, in some schedules."""
        self.steps += 1
        if self.steps > MOST_STEPS:
            raise WaitsForever(f"{self.current.name} goes on and on")
        current = self.current
        if current.is_fresh:
            # It did nothing since it was chosen: to choose another now would have been that choice.
            current.is_fresh = False
            return
        if self.preemptions <= 0 or not self.is_exploring:
            return
        others = [fiber for fiber in self.fibers if fiber.is_ready and fiber is not current]
        if others:
            choice = self.choose(len(others) + 1)
            if choice:
                self.preemptions -= 1
                self._next = others[choice - 1]
                self._main.switch()

    def relax(self, _spins: Any = 0) -> None:
        """Sleep until another fiber stored to a word that this one loaded since it last slept."""
        fiber = self.current
        seen = fiber.seen
        fiber.seen = {}
        for word, version in seen.items():
            if word.version != version:
                self.steps += 1
                if self.steps > MOST_STEPS:
                    raise WaitsForever(f"{fiber.name} goes on and on")
                return
        fiber.blocks += 1
        me = (fiber, fiber.blocks)
        for word in seen:
            if word.watchers is None:
                word.watchers = [me]
            else:
                word.watchers.append(me)
        fiber.watched = seen
        fiber.is_ready = False
        self._main.switch()
        fiber.is_fresh = True

    def sleep(self, word: Any) -> None:
        """Sleep until another fiber calls `rouse`: the system's own waiting, not a spin."""
        fiber = self.current
        fiber.blocks += 1
        fiber.watched = {word: word.version}
        fiber.is_ready = False
        self._main.switch()
        fiber.is_fresh = True

    def rouse(self, fiber: Fiber) -> None:
        """Wake a fiber that called `sleep`."""
        if not fiber.is_over:
            fiber.is_ready = True

    def wake(self, watchers: list[tuple[Fiber, int]]) -> None:
        """Let fibers look again at what they wait for."""
        for fiber, blocks in watchers:
            if fiber.blocks == blocks and not fiber.is_over:
                fiber.is_ready = True
        watchers.clear()

    def run(self) -> None:
        """Run until every fiber but daemons is over.

        Raises
        ------
        WaitsForever
            Somebody waits and nobody is left to wake them.
        """
        self.is_exploring = True
        self._go_on(lambda fiber: not fiber.is_daemon)
        self.is_exploring = False

    def drain(self, last: Fiber) -> None:
        """Run on, in one fixed order, until `last` is over."""
        for fiber in self.fibers:
            last.clock = [max(pair) for pair in zip(last.clock, fiber.clock, strict=True)]
        self._go_on(lambda fiber: fiber is last)

    def _go_on(self, is_awaited: Callable[[Fiber], bool]) -> None:
        awaited = [fiber for fiber in self.fibers if is_awaited(fiber)]
        while True:
            fiber = self._next
            self._next = None
            if fiber is None:
                if all(one.is_over for one in awaited):
                    break
                fiber = self._pick()
            self.current = fiber
            fiber.greenlet.switch()
            if fiber.greenlet.dead:
                fiber.is_over = True
                fiber.is_ready = False
        self.current = self.setup

    def _pick(self) -> Fiber:
        """Choose who goes on where the running fiber waits or is over."""
        fibers = self.fibers
        at = self.current.number
        ready = [fiber for fiber in fibers[at:] + fibers[:at] if fiber.is_ready]
        if not ready:
            self._pass_time()
            return self._pick()
        if len(ready) > 1 and self.is_exploring and self.switches + self.preemptions > 0:
            choice = self.choose(len(ready))
            if choice and self.switches:
                self.switches -= 1
            elif choice:
                self.preemptions -= 1
            return ready[choice]
        return ready[0]

    def _pass_time(self) -> None:
        """Let time pass where everybody waits; complain where nobody waits for that."""
        if self.tick is None or self.ticks >= MOST_TICKS:
            self._complain()
            return
        self.ticks += 1
        current, is_exploring = self.current, self.is_exploring
        self.current, self.is_exploring = self.setup, False
        self.tick()
        self.current, self.is_exploring = current, is_exploring

    def _complain(self) -> None:
        waiting = []
        for fiber in self.fibers:
            if not fiber.is_over and not fiber.is_daemon:
                words = ", ".join(word.name for word in fiber.watched)
                waiting.append(f"{fiber.name} on {words or 'nothing'}")
        raise WaitsForever("waiting forever: " + "; ".join(waiting))

    def end(self) -> None:
        """Unwind what is still running."""
        for fiber in self.fibers:
            if fiber.greenlet:
                self.current = fiber
                self.is_exploring = False
                fiber.greenlet.throw(GreenletExit)


@dataclass
class Finding:
    """A schedule in which a property does not hold.

    Attributes
    ----------
    seed : str
        For `decode`.
    kind, message : str
    """

    seed: str
    kind: str
    message: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.message} (seed {self.seed})"


@dataclass
class Outcome:
    """What a search saw.

    Attributes
    ----------
    name : str
    schedules : int
        Different schedules that ran.
    sampled : int
        Of these, random ones beyond the bounds.
    is_complete : bool
        There are no others within the bounds.
    finding : Finding or None
        The first schedule in which a property does not hold; the search ends there.
    seconds : float
        Of processor time.
    steps : int
        Memory operations in all.
    notes : dict of str to int
        How often a scenario reached what it is there for.
    """

    name: str
    schedules: int = 0
    sampled: int = 0
    is_complete: bool = False
    finding: Finding | None = None
    seconds: float = 0.0
    steps: int = 0
    notes: dict[str, int] = field(default_factory=dict)

    def note(self, notes: dict[str, int]) -> None:
        """Add to the notes."""
        for what, times in notes.items():
            self.notes[what] = self.notes.get(what, 0) + times

    def add(self, other: Outcome) -> None:
        """Add what a later search of the same configuration saw."""
        self.schedules += other.schedules
        self.sampled += other.sampled
        self.finding = self.finding or other.finding
        self.seconds += other.seconds
        self.steps += other.steps
        self.note(other.notes)

    def __str__(self) -> str:
        extent = "all" if self.is_complete else "not all"
        extent += f" within the bounds, {self.sampled:,} random" if self.sampled else ""
        notes = "".join(f", {what}: {times:,}" for what, times in sorted(self.notes.items()))
        line = f"{self.name}: {self.schedules:,} schedules ({extent}), {self.seconds:.1f} s{notes}"
        return line if self.finding is None else f"{line}\n  {self.finding}"


def encode(path: list[int], bounds: Bounds) -> str:
    """Return a schedule as a seed: its bounds, and ``position.choice`` for each that is not 0."""
    budgets = f"{bounds.preemptions},{bounds.switches},{bounds.faults},{bounds.stale}"
    choices = (f"{position}.{choice}" for position, choice in enumerate(path) if choice)
    return " ".join((budgets, *choices))


def decode(seed: str) -> tuple[list[int], Bounds]:
    """Return the schedule of a seed and its bounds; what lies behind its last choice is 0."""
    budgets, *choices = seed.split()
    pairs = [tuple(map(int, choice.split("."))) for choice in choices]
    path = [0] * (pairs[-1][0] + 1 if pairs else 0)
    for position, choice in pairs:
        path[position] = choice
    return path, Bounds(*map(int, budgets.split(",")))


def advance(path: list[int], widths: list[int]) -> bool:
    """Change a schedule into the next one of a depth-first search; False where there is none."""
    del path[len(widths) :]
    while path and path[-1] + 1 >= widths[len(path) - 1]:
        path.pop()
    if not path:
        return False
    path[-1] += 1
    return True
