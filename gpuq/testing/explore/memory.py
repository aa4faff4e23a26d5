"""Words whose every access is a step of the search and is checked for races.

The memory model is C++'s without consume, which is also what PTX gives these operations: a
release store and an acquire load that sees it order what stands before the one and behind the
other. Each fiber has a vector clock, each store keeps the clock of its release, and two accesses
of a word are ordered when the later one's clock has seen the earlier one. A plain access must be
ordered with every conflicting one; else it is a race, also in schedules where the values happen
to be right.

Atomic loads see the newest store, or in some schedules (`Bounds.stale`) an older one: any that
was not overwritten before something the fiber has seen. Stores take effect in the order of the
schedule, and nothing is loaded before it is stored.

Scopes: a read-modify-write or ``_device`` operation of a kernel does not reach the host, so a
word that it touches must not be touched by the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from gpuq.testing.explore.schedule import Fiber, Race, ScenarioError, Violation, World

_MASK = 0xFFFF_FFFF_FFFF_FFFF
_SIGN = 1 << 63

# Who touched a word.
_DEVICE_SCOPE = 1
_HOST = 2


class Word:
    """One word, the last accesses of each kind, and the stores that a load may still see."""

    # What most words keep for ever stands in the class: words are made anew for each schedule.
    version = 0
    release: list[int] | None = None
    plain_writer = 0
    plain_write = 0
    plain_reads: dict[int, int] | None = None
    atomic_writes: dict[int, int] | None = None
    atomic_reads: dict[int, int] | None = None
    watchers: list[tuple[Fiber, int]] | None = None
    is_quiet = False
    is_private = False
    owner = 0
    touched = 0
    on_store: Callable[[int, int, int], None] | None = None

    def __init__(self, array: str, index: int, value: int) -> None:
        self.array = array
        self.index = index
        self.value = value
        # (value, release, writer, its clock) of each store in order; only where loads may be stale.
        self.history: list[tuple[int, list[int] | None, int, int]] | None = None

    @property
    def name(self) -> str:
        """Which word it is, for people."""
        return f"{self.array}[{self.index}]"


class _Cells(dict[int, Word]):
    """Words by index, made when they are first touched."""

    def __init__(self, make: Callable[[int], Word]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, index: int) -> Word:
        word = self._make(index)
        self[index] = word
        return word


class Words:
    """An array of words that fibers share; plain indexing is a plain access.

    Parameters
    ----------
    world : World
    name : str
    values : sequence of int
    private : container of int
        Words that only one fiber ever touches, atomically: these accesses are no steps of the
        search. A second fiber is an error.
    quiet : container of int
        Words with a plain access among every two that conflict: an order that matters shows as
        a race in whatever schedule, so these accesses are no steps either.
    on_store : callable, optional
        Called with ``(index, before, value)`` when an atomic operation stored.
    """

    def __init__(
        self,
        world: World,
        name: str,
        values: Sequence[int],
        *,
        private: Any = (),
        quiet: Any = (),
        on_store: Callable[[int, int, int], None] | None = None,
    ) -> None:
        self._world = world
        self._values = values
        self.name = name

        def make(index: int) -> Word:
            if not 0 <= index < len(values):
                raise Violation(f"{name}[{index}] is beyond its {len(values)} words")
            word = Word(name, index, values[index])
            word.is_private = index in private
            word.is_quiet = index in quiet
            if on_store is not None:
                word.on_store = on_store
            return word

        self.cells = _Cells(make)

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, index: int) -> int:
        return plain_load(self._world, self.cells[index])

    def __setitem__(self, index: Any, value: int) -> None:
        if isinstance(index, slice):
            for position in range(*index.indices(len(self._values))):
                plain_store(self._world, self.cells[position], value)
        else:
            plain_store(self._world, self.cells[index], value)

    def peek(self, index: int) -> int:
        """Return a word without an access: for checks."""
        word = self.cells.get(index)
        return int(self._values[index]) if word is None else word.value


class Memory:
    """Bytes by address; what is outside of every region must not be touched."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._regions: list[tuple[int, int, str]] = []
        self._cells = _Cells(self._make)

    def add(self, name: str, start: int, nbytes: int) -> None:
        """Make ``[start, start + nbytes)`` accessible; the bytes are 0."""
        self._regions.append((start, start + nbytes, name))

    def _make(self, address: int) -> Word:
        for start, end, name in self._regions:
            if start <= address < end:
                return Word(name, address - start, 0)
        raise Violation(f"address {address:#x} belongs to nobody")

    def load(self, address: int) -> int:
        """Load a byte, plainly."""
        return plain_load(self._world, self._cells[address])

    def store(self, address: int, value: int) -> None:
        """Store a byte, plainly."""
        plain_store(self._world, self._cells[address], value)

    def copy(self, destination: int, source: int, nbytes: int) -> None:
        """Copy bytes, plainly."""
        world, cells = self._world, self._cells
        for i in range(nbytes):
            plain_store(world, cells[destination + i], plain_load(world, cells[source + i]))

    def peek(self, address: int) -> int:
        """Return a byte without an access: for checks."""
        return self._cells[address].value


# --- plain accesses ----------------------------------------------------------------------------


def plain_load(world: World, word: Word) -> int:
    """Load plainly: every store must be ordered before it."""
    fiber = world.current
    clock = fiber.clock
    if word.plain_write > clock[word.plain_writer]:
        _race(world, word, "plain load", "plain store", word.plain_writer)
    if word.atomic_writes:
        _check(world, word, "plain load", "atomic store", word.atomic_writes)
    if word.plain_reads is None:
        word.plain_reads = {}
    word.plain_reads[fiber.number] = clock[fiber.number]
    if world.trace is not None:
        _note(world, "plain load", word, word.value)
    return word.value


def plain_store(world: World, word: Word, value: int) -> None:
    """Store plainly: every other access must be ordered before it."""
    fiber = world.current
    clock = fiber.clock
    if word.plain_write > clock[word.plain_writer]:
        _race(world, word, "plain store", "plain store", word.plain_writer)
    if word.plain_reads:
        _check(world, word, "plain store", "plain load", word.plain_reads)
        word.plain_reads = None
    if word.atomic_writes:
        _check(world, word, "plain store", "atomic store", word.atomic_writes)
        word.atomic_writes = None
    if word.atomic_reads:
        _check(world, word, "plain store", "atomic load", word.atomic_reads)
        word.atomic_reads = None
    word.plain_writer = fiber.number
    word.plain_write = clock[fiber.number]
    if world.has_stale:
        # All accesses so far are ordered before this one, so nobody may see anything older.
        _remember(word, value, None, fiber.number, word.plain_write)
    word.value = value
    word.release = None
    word.version += 1
    if world.trace is not None:
        _note(world, "plain store", word, value)


def _check(world: World, word: Word, what: str, other: str, accesses: dict[int, int]) -> None:
    clock = world.current.clock
    for number, at in accesses.items():
        if at > clock[number]:
            _race(world, word, what, other, number)


def _race(world: World, word: Word, what: str, other: str, number: int) -> None:
    name = world.fibers[number - 1].name if number else "setup"
    raise Race(f"{word.name}: {what} by {world.current.name} is not ordered with {other} by {name}")


def _remember(word: Word, value: int, release: list[int] | None, writer: int, at: int) -> None:
    if word.history is None:
        word.history = [(word.value, word.release, 0, 0)]
    word.history.append((value, release, writer, at))


# --- atomic operations -------------------------------------------------------------------------


def _arrive(world: World, word: Word, is_device_scope: bool) -> Fiber:
    """Begin an atomic operation: a step of the search, unless nobody else can tell."""
    if not word.is_quiet:
        world.point()
    fiber = world.current
    if not fiber.is_device:
        if fiber.number:
            word.touched |= _HOST
    elif is_device_scope:
        word.touched |= _DEVICE_SCOPE
    if word.touched == _HOST | _DEVICE_SCOPE:
        raise Race(f"{word.name}: an operation of device scope does not reach the host")
    if word.plain_write > fiber.clock[word.plain_writer]:
        _race(world, word, "atomic access", "plain store", word.plain_writer)
    return fiber


def _own(world: World, word: Word) -> None:
    """Check that nobody else touches a private word: then nothing about it needs to be known."""
    number = world.current.number
    if word.owner != number:
        if word.owner:
            raise ScenarioError(f"{word.name} is said to be private and is not")
        word.owner = number


def _put(world: World, word: Word, fiber: Fiber, value: int, is_release: bool) -> None:
    """Make a store the newest one."""
    clock = fiber.clock
    number = fiber.number
    if word.plain_reads:
        _check(world, word, "atomic store", "plain load", word.plain_reads)
    if word.atomic_writes is None:
        word.atomic_writes = {}
    word.atomic_writes[number] = clock[number]
    release = clock if is_release else None
    if world.has_stale:
        _remember(word, value, release, number, clock[number])
        fiber.oldest[word] = word.version + 1
    before = word.value
    word.value = value
    word.release = release
    if fiber.seen.get(word) == word.version:
        fiber.seen[word] += 1  # its own store is no news to it
    word.version += 1
    if word.watchers:
        world.wake(word.watchers)
    if is_release:
        # What comes now can be told from what was released; the old clock stays with the store.
        fiber.clock = clock.copy()
        fiber.clock[number] += 1
    if word.on_store is not None:
        word.on_store(word.index, before, value)


def _see(world: World, word: Word, fiber: Fiber) -> tuple[int, list[int] | None, int]:
    """Choose one of the stores that a load may see."""
    history = word.history
    assert history is not None
    newest = len(history) - 1
    oldest = fiber.oldest.get(word, 0)
    for position in range(newest, oldest, -1):
        _, _, writer, at = history[position]
        if at <= fiber.clock[writer]:
            oldest = position
            break
    choice = world.choose(newest - oldest + 1) if newest > oldest else 0
    if choice:
        world.stale -= 1
    value, release, _, _ = history[newest - choice]
    return value, release, newest - choice


def _make_load(world: World, name: str, is_acquire: bool, is_device_scope: bool) -> Any:
    def load(words: Any, index: Any) -> Any:
        if words.__class__ is not Words:
            return words[index]
        word = words.cells[index]
        if word.is_private:
            _own(world, word)
            return word.value
        fiber = _arrive(world, word, is_device_scope)
        if word.atomic_reads is None:
            word.atomic_reads = {}
        word.atomic_reads[fiber.number] = fiber.clock[fiber.number]
        value, release, version = word.value, word.release, word.version
        if world.has_stale:
            if world.stale > 0 and version and world.is_exploring and not word.is_quiet:
                value, release, version = _see(world, word, fiber)
            fiber.oldest[word] = version
        fiber.seen.setdefault(word, version)
        if is_acquire and release is not None:
            fiber.clock = list(map(max, fiber.clock, release))
        if world.trace is not None:
            _note(world, name + " (stale)" * (version != word.version), word, value)
        return value

    return load


def _make_store(world: World, name: str, is_release: bool, is_device_scope: bool) -> Any:
    def store(words: Any, index: Any, value: Any) -> None:
        if words.__class__ is not Words:
            words[index] = value
            return
        word = words.cells[index]
        if word.is_private:
            _own(world, word)
            word.value = value
            return
        fiber = _arrive(world, word, is_device_scope)
        if world.trace is not None:
            _note(world, name, word, value)
        _put(world, word, fiber, value, is_release)

    return store


def _exchange(world: World, words: Any, index: Any, update: Any, name: str) -> Any:
    """Read, modify and write in one step; `update` returns None to leave the word as it is."""
    word = words.cells[index]
    fiber = _arrive(world, word, world.current.is_device)
    if word.release is not None:
        fiber.clock = list(map(max, fiber.clock, word.release))
    before = word.value
    if word.atomic_reads is None:
        word.atomic_reads = {}
    word.atomic_reads[fiber.number] = fiber.clock[fiber.number]
    fiber.seen.setdefault(word, word.version)
    if world.has_stale:
        fiber.oldest[word] = word.version
    value = update(before)
    if world.trace is not None:
        _note(world, name, word, before if value is None else value)
    if value is not None:
        # It goes on with the release that it read, which it has joined.
        _put(world, word, fiber, value, True)
    return before


def operations(world: World) -> dict[str, Callable[..., Any]]:
    """Return `gpuq.ordering`'s operations, by name, over the words of `world`."""

    def fetch_add(words: Any, index: Any, value: Any) -> Any:
        return _exchange(world, words, index, lambda before: before + value, "fetch_add")

    def compare_exchange(words: Any, index: Any, expected: Any, value: Any) -> Any:
        return _exchange(
            world,
            words,
            index,
            lambda before: value if before == expected else None,
            "compare_exchange",
        )

    def as_word(value: Any) -> Any:
        return value & _MASK

    def as_signed(word: Any) -> Any:
        return word if 0 <= word < _SIGN else ((word + _SIGN) & _MASK) - _SIGN

    loads = {
        "load_acquire": (True, False),
        "load_acquire_device": (True, True),
        "load_relaxed": (False, False),
    }
    stores = {
        "store_release": (True, False),
        "store_release_device": (True, True),
        "store_relaxed": (False, False),
    }
    load_clock = _make_load(world, "clock_ns", False, False)

    def clock_ns() -> Any:
        return 0 if world.time is None else load_clock(world.time, 0)

    return {
        **{name: _make_load(world, name, *order) for name, order in loads.items()},
        **{name: _make_store(world, name, *order) for name, order in stores.items()},
        "as_word": as_word,
        "as_signed": as_signed,
        "fetch_add": fetch_add,
        "compare_exchange": compare_exchange,
        "relax": world.relax,
        "clock_ns": clock_ns,
    }


def _note(world: World, what: str, word: Word, value: Any) -> None:
    assert world.trace is not None
    shown = f"{value:#x}" if isinstance(value, int) and value > 9 else str(value)
    world.trace.append(f"{world.current.name:<12} {what:<22} {word.name} = {shown}")
