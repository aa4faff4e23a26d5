"""PTX of gpuq's functions without a GPU: compile, take apart, and say what is wrong with it.

`faults` holds the rules that DESIGN's table of memory orders gives to generated code. They are
judged on the PTX, since that is where a compiler may have hoisted a load out of its loop, split a
store into bytes, or taken a load for read-only.
"""

from __future__ import annotations

import functools
import re
import types as python_types
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest
from numba import types

import gpuq
from gpuq.kernels.stream import Stream
from gpuq.layout import OPTIONS, SEQUENCE, WORD_BYTES

CAPABILITIES = [(7, 5), (8, 0), (9, 0), (10, 0), (12, 0)]

WORDS = types.Array(types.uint64, 1, "C")
INTEGERS = types.Array(types.int64, 1, "C")
_SCALARS = {"capacity": types.int64, "post_timeout_ns": types.int64}
QUEUE = types.NamedTuple([_SCALARS.get(name, WORDS) for name in gpuq.Queue._fields], gpuq.Queue)
_STREAM_ARRAYS = {
    "tiles": types.Array(types.uint8, 3, "C"),
    "tickets": types.Array(types.int64, 2, "C"),
    "words": types.Array(types.int64, 2, "C"),
}
STREAM = types.NamedTuple(
    [_STREAM_ARRAYS.get(name, types.int64) for name in Stream._fields], Stream
)

# What may be done to the words of each array of the queue, and how (DESIGN, section 3).
_PLAIN_STORE = re.compile(r"st(\.global)?(\.v[24])?\.[busf]64$")
_RULES: dict[str, list[re.Pattern[str]]] = {
    "submissions": [re.compile(r"st\.release\.sys\.b64$"), _PLAIN_STORE],
    "flags": [re.compile(r"ld\.acquire\.sys\.b64$")],
    "control": [re.compile(r"ld\.acquire\.sys\.b64$")],
    "counters": [re.compile(r"ld\.(acquire|relaxed)\.sys\.b64$")],
    "tail": [re.compile(r"ld\.relaxed\.sys\.b64$"), re.compile(r"atom\.acq_rel\.gpu\.cas\.b64$")],
    "turns": [
        re.compile(r"ld\.acquire\.gpu\.b64$"),
        re.compile(r"atom\.acq_rel\.gpu\.cas\.b64$"),
        re.compile(r"st\.release\.gpu\.b64$"),
    ],
    "taken": [re.compile(r"ld\.acquire\.gpu\.b64$"), re.compile(r"atom\.acq_rel\.gpu\.cas\.b64$")],
}
assert set(_RULES) == set(gpuq.Queue._fields) - set(_SCALARS), "a new array needs its rule"


# --- compile -------------------------------------------------------------------------------


@functools.cache
def _stand_in_for_a_device() -> None:
    """Let Numba compile kernels where it asks for the current device, of which there is none."""
    from numba.cuda import codegen, dispatcher

    device = python_types.SimpleNamespace(compute_capability=CAPABILITIES[0])
    context = python_types.SimpleNamespace(device=device)
    dispatcher.get_current_device = lambda: device
    codegen.devices = python_types.SimpleNamespace(get_context=lambda number=None: context)


class Compiled:
    """A kernel, compiled for any compute capability.

    Parameters
    ----------
    body : function
    arguments : dict of str to type
        In the order of the body's parameters.
    """

    def __init__(self, body: Callable[..., Any], arguments: dict[str, Any]) -> None:
        pytest.importorskip("cuda.bindings.nvvm", reason="the nvvm and nvrtc wheels are not there")
        _stand_in_for_a_device()
        from numba.cuda.dispatcher import _Kernel

        self._kernel = _Kernel(body, tuple(arguments.values()))
        self.parameters = _flatten(arguments)
        self._parsed: dict[tuple[int, int], Ptx] = {}

    def text(self, capability: tuple[int, int]) -> str:
        """Return its PTX."""
        return str(self._kernel._codelibrary.get_asm_str(cc=capability))

    def ptx(self, capability: tuple[int, int]) -> Ptx:
        """Return its PTX, taken apart."""
        if capability not in self._parsed:
            self._parsed[capability] = Ptx(self.text(capability), self.parameters)
        return self._parsed[capability]

    def cubin(self, capability: tuple[int, int]) -> bytes:
        """Return machine code, assembled from the PTX."""
        from cuda.core import Linker, LinkerOptions, ObjectCode

        code = ObjectCode.from_ptx(self.text(capability).encode())
        options = LinkerOptions(arch="sm_{}{}".format(*capability))
        return bytes(Linker(code, options=options).link("cubin").code)


def compiled_body(body: Callable[..., Any], arguments: dict[str, Any]) -> Compiled:
    """Compile a kernel that runs a body for `Loader.launch`, its arguments named after it."""
    from numba import cuda

    pytest.importorskip("cuda.bindings.nvvm", reason="the nvvm and nvrtc wheels are not there")
    scope: dict[str, Any] = {"cuda": cuda, "body": cuda.jit(device=True)(body)}
    names = ", ".join(arguments)
    exec(f"def kernel({names}):\n    body(cuda.blockIdx.x, cuda.gridDim.x, {names})\n", scope)
    return Compiled(scope["kernel"], arguments)


def accesses_at_fault(ptx: Ptx) -> list[str]:
    """Say what is wrong with a kernel's accesses, whatever loops of its own it has."""
    return [*_read_only_loads(ptx), *_forbidden_accesses(ptx), *_spins_without_end(ptx)]


def _flatten(arguments: dict[str, Any]) -> list[str]:
    """Name the parameters that a kernel has in PTX: of an array its data pointer is "name"."""
    names: list[str] = []

    def add(name: str, numba_type: Any) -> None:
        if isinstance(numba_type, types.Array):
            for part in ("meminfo", "parent", "items", "itemsize"):
                names.append(f"{name}.{part}")
            names.append(name)
            names.extend(f"{name}.shape{i}" for i in range(numba_type.ndim))
            names.extend(f"{name}.stride{i}" for i in range(numba_type.ndim))
        elif isinstance(numba_type, types.NamedTuple):
            prefix = "" if numba_type.instance_class is gpuq.Queue else f"{name}."
            for field_name, field_type in zip(numba_type.fields, numba_type.types, strict=True):
                add(prefix + field_name, field_type)
        elif isinstance(numba_type, types.BaseTuple):
            for number, part_type in enumerate(numba_type):
                add(f"{name}.{number}", part_type)
        else:
            names.append(f"{name}.value")

    for name, numba_type in arguments.items():
        add(name, numba_type)
    return names


# --- take apart ----------------------------------------------------------------------------


@dataclass
class Instruction:
    """One instruction; `opcode` is whole, with its modifiers."""

    line: int
    opcode: str
    operands: str
    is_conditional: bool

    @property
    def address(self) -> tuple[str, int] | None:
        """Register and byte offset that it loads from or stores to."""
        found = re.search(r"\[(%\w+)(?:\+(-?\d+))?\]", self.operands)
        return (found[1], int(found[2] or 0)) if found else None

    @property
    def is_memory(self) -> bool:
        """Whether it touches memory that other threads may see."""
        head = self.opcode.split(".")
        return head[0] in ("ld", "st", "atom", "red") and not {"param", "local", "shared"} & set(
            head
        )

    @property
    def is_store(self) -> bool:
        """Whether it only writes."""
        return self.opcode.startswith("st.")


@dataclass
class Block:
    """Instructions that run one behind the other."""

    instructions: list[Instruction] = field(default_factory=list)
    followers: set[int] = field(default_factory=set)


class Ptx:
    """The one kernel of a PTX text: its blocks, its loops, and what its addresses point to.

    Everything must have been inlined: a call would hide what is behind it.
    """

    def __init__(self, text: str, parameters: list[str]) -> None:
        self.text = text
        entry = re.search(r"\.entry\s+\S+\((.*?)\)\s*(?:\.\w+[^{]*)?\{(.*?)^\}", text, re.S | re.M)
        assert entry is not None, "no kernel"
        self._names = dict(zip(re.findall(r"(\S+_param_\d+)", entry[1]), parameters, strict=True))
        self.blocks, self._labels = _blocks(entry[2])
        self.instructions = [i for block in self.blocks for i in block.instructions]
        assert not [i for i in self.instructions if i.opcode.startswith(("call", "brx"))]
        self._origins = self._trace()
        self.loops = _loops(self.blocks)

    def array_of(self, instruction: Instruction) -> str:
        """Return the name of the array that a memory instruction touches; "" if none is known."""
        address = instruction.address
        found = {n for n in self._origins.get(address[0], ()) if "." not in n} if address else set()
        assert len(found) <= 1, f"{instruction} may touch any of {found}"
        return next(iter(found), "")

    def accesses(self, array: str) -> list[Instruction]:
        """Return all that touches an array."""
        return [i for i in self.instructions if i.is_memory and self.array_of(i) == array]

    def opcodes(self, array: str) -> set[str]:
        """Return how an array is touched."""
        return {instruction.opcode for instruction in self.accesses(array)}

    def in_loops(self, array: str) -> set[str]:
        """Return how an array is touched inside of loops."""
        inside = {id(i) for loop in self.loops for i in self.within(loop)}
        return {i.opcode for i in self.accesses(array) if id(i) in inside}

    def within(self, loop: Iterable[int]) -> list[Instruction]:
        """Return a loop's instructions."""
        return [i for number in sorted(loop) for i in self.blocks[number].instructions]

    def is_behind(self, later: Instruction, earlier: Instruction) -> bool:
        """Whether whoever comes to `later` came through `earlier` before."""
        numbers = {id(i): n for n, b in enumerate(self.blocks) for i in b.instructions}
        first, second = numbers[id(earlier)], numbers[id(later)]
        if first == second:
            return earlier.line < later.line
        return first in _dominators(self.blocks)[second]

    def _trace(self) -> dict[str, set[str]]:
        """For each register, the parameters that its value was computed from, not loaded by."""
        origins: dict[str, set[str]] = {}
        changed = True
        while changed:
            changed = False
            for instruction in self.instructions:
                targets, sources = _registers(instruction)
                if instruction.opcode.startswith("ld.param"):
                    reached = {
                        name for text, name in self._names.items() if f"[{text}]" in
                        instruction.operands.replace("+0]", "]")
                    }  # fmt: skip
                elif instruction.opcode.startswith(("ld", "atom")):
                    reached = set()
                else:
                    reached = set().union(*(origins.get(source, set()) for source in sources))
                for target in targets:
                    known = origins.setdefault(target, set())
                    if not reached <= known:
                        known |= reached
                        changed = True
        return origins


def _registers(instruction: Instruction) -> tuple[list[str], list[str]]:
    """Return (written, read) registers."""
    if instruction.is_store or instruction.opcode.startswith(("bra", "ret", "bar", "red")):
        return [], re.findall(r"%\w+", instruction.operands)
    first, _, rest = instruction.operands.partition(",")
    if first.startswith("{"):
        first, _, rest = instruction.operands.partition("}")
    return re.findall(r"%\w+", first), re.findall(r"%\w+", rest)


def _blocks(body: str) -> tuple[list[Block], dict[str, int]]:
    blocks = [Block()]
    labels: dict[str, int] = {}
    jumps: list[tuple[int, str]] = []
    for line, raw in enumerate(body.splitlines()):
        text = raw.split("//")[0].strip()
        if found := re.fullmatch(r"(\$\w+):", text):
            if blocks[-1].instructions:
                blocks.append(Block())
                blocks[-2].followers.add(len(blocks) - 1)
            labels[found[1]] = len(blocks) - 1
            continue
        found = re.fullmatch(r"(?:@!?(%\w+)\s+)?([a-z][\w.:]*)\s*(.*?);", text)
        if not found or text.startswith("."):
            continue
        instruction = Instruction(line, found[2], found[3].strip(), found[1] is not None)
        blocks[-1].instructions.append(instruction)
        if instruction.opcode.startswith("bra"):
            jumps.append((len(blocks) - 1, instruction.operands))
        if instruction.opcode.startswith(("bra", "ret", "exit", "trap")):
            blocks.append(Block())
            if instruction.is_conditional:
                blocks[-2].followers.add(len(blocks) - 1)
    for number, label in jumps:
        blocks[number].followers.add(labels[label])
    # A block that ended by a jump was left without its fall-through on purpose.
    return blocks, labels


def _dominators(blocks: list[Block]) -> list[set[int]]:
    before: list[set[int]] = [set() for _ in blocks]
    for number, block in enumerate(blocks):
        for follower in block.followers:
            before[follower].add(number)
    everything = set(range(len(blocks)))
    dominators = [{0}] + [set(everything) for _ in blocks[1:]]
    changed = True
    while changed:
        changed = False
        for number in range(1, len(blocks)):
            parents = [dominators[parent] for parent in before[number]]
            now = {number} | (set.intersection(*parents) if parents else set())
            if now != dominators[number]:
                dominators[number] = now
                changed = True
    return dominators


def _loops(blocks: list[Block]) -> list[frozenset[int]]:
    """Return the natural loops, one for each jump back to a block that dominates the jump."""
    dominators = _dominators(blocks)
    before: dict[int, set[int]] = {}
    for number, block in enumerate(blocks):
        for follower in block.followers:
            before.setdefault(follower, set()).add(number)
    loops = []
    for number, block in enumerate(blocks):
        for head in block.followers & dominators[number]:
            inside = {head, number}
            waiting = [number] if number != head else []
            while waiting:
                for parent in before.get(waiting.pop(), set()) - inside:
                    inside.add(parent)
                    waiting.append(parent)
            loops.append(frozenset(inside))
    return loops


# --- judge ---------------------------------------------------------------------------------


def faults(ptx: Ptx) -> list[str]:
    """Say in words what is wrong with a kernel's accesses; nothing where all is right."""
    return [
        *_read_only_loads(ptx),
        *_forbidden_accesses(ptx),
        *_loops_that_see_nothing(ptx),
        *_spins_without_end(ptx),
        *_submissions_in_the_wrong_order(ptx),
    ]


def _read_only_loads(ptx: Ptx) -> list[str]:
    return [f"line {i.line}: {i.opcode}" for i in ptx.instructions if ".nc" in i.opcode]


def _forbidden_accesses(ptx: Ptx) -> list[str]:
    return [
        f"line {i.line}: {i.opcode} on {array}"
        for array, allowed in _RULES.items()
        for i in ptx.accesses(array)
        if not any(pattern.match(i.opcode) for pattern in allowed)
    ]


def _loops_that_see_nothing(ptx: Ptx) -> list[str]:
    """Find loops without an acquiring load or an atomic in them: a hoisted poll leaves such.

    Loops that walk along an array of the kernel's own end by themselves.
    """
    return [
        f"the loop at line {ptx.within(loop)[0].line} loads nothing that others change"
        for loop in ptx.loops
        if not any(
            i.opcode.startswith(("ld.acquire", "atom.acq_rel")) or _walks(ptx, i)
            for i in ptx.within(loop)
        )
    ]


def _walks(ptx: Ptx, instruction: Instruction) -> bool:
    return instruction.is_memory and ptx.array_of(instruction) in ("indices", "statuses")


def _spins_without_end(ptx: Ptx) -> list[str]:
    """Find loops that sleep and look neither at STATE nor at a clock."""
    spins = [loop for loop in ptx.loops if _sleeps(ptx, loop)]
    innermost = [loop for loop in spins if not any(other < loop for other in spins)]
    return [
        f"the spin at line {ptx.within(loop)[0].line} looks neither at STATE nor at a clock"
        for loop in innermost
        if not any(
            ptx.array_of(i) == "control" if i.is_memory else "%globaltimer" in i.operands
            for i in ptx.within(loop)
        )
    ]


def _sleeps(ptx: Ptx, loop: Iterable[int]) -> bool:
    return any(i.opcode.startswith("nanosleep") for i in ptx.within(loop))


def _submissions_in_the_wrong_order(ptx: Ptx) -> list[str]:
    """Find releases of a submission that do not stand right behind all its other words."""
    found = []
    payload = {word * WORD_BYTES for word in range(SEQUENCE + 1, OPTIONS + 1)}
    for block in ptx.blocks:
        stores = [
            i
            for i in block.instructions
            if i.is_memory and i.is_store and ptx.array_of(i) == "submissions"
        ]
        if not stores:
            continue
        releases = [i for i in stores if "release" in i.opcode]
        written = [offset for i in stores[:-1] for offset in _words_of(i)]
        if (
            len(releases) != 1
            or stores[-1] is not releases[0]
            or sorted(written) != sorted(payload)
        ):
            text = ", ".join(i.opcode for i in stores)
            found.append(f"line {stores[0].line}: a submission is written by {text}")
    return found


def _words_of(store: Instruction) -> list[int]:
    """Return the byte offsets of the 8-byte words that a store writes."""
    address = store.address
    assert address is not None
    count = int(found[1]) if (found := re.search(r"\.v(\d)", store.opcode)) else 1
    return [address[1] + i * WORD_BYTES for i in range(count)]
