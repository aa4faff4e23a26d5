"""The PTX of every function for kernels, judged and assembled for every kind of GPU.

It is the generated code that is judged, because the source can lie: a compiler may hoist a
polling load, split a store, or read shared words through a cache that is not coherent.
"""

from __future__ import annotations

import functools
import inspect
import re
from typing import Any

import gpu
import pytest
from numba import types
from numba.cuda.extending import overload
from ptx import CAPABILITIES, INTEGERS, QUEUE, STREAM, WORDS, Compiled, faults

import gpuq
from gpuq import kernels
from gpuq.launching import cuda_kernel
from gpuq.layout import DESTINATION, SEQUENCE, SOURCE
from gpuq.ordering import (
    as_word,
    load_acquire,
    load_acquire_device,
    relax,
    store_relaxed,
    store_release,
)

CAPABILITY_IDS = ["{}.{}".format(*capability) for capability in CAPABILITIES]
HANDLE = 1 << 32

ACQUIRE, RELEASE = "ld.acquire.sys.b64", "st.release.sys.b64"
DEVICE_ACQUIRE, SWAP = "ld.acquire.gpu.b64", "atom.acq_rel.gpu.cas.b64"

TRIES = {("submissions", RELEASE), ("tail", SWAP), ("turns", DEVICE_ACQUIRE)}
POSTS = TRIES | {("control", ACQUIRE, "in a loop")}
WAITS = {("flags", ACQUIRE, "in a loop"), ("control", ACQUIRE, "in a loop"), ("turns", SWAP)}
PULLS = POSTS | WAITS
COUNTS = {("counters", ACQUIRE, "in a loop"), ("control", ACQUIRE, "in a loop"), ("taken", SWAP)}
GATHERS = PULLS | COUNTS

MUST: dict[str, set[Any]] = {
    "bind": PULLS,
    "block_barrier": set(),
    "block_rank": set(),
    "block_size": set(),
    "errno_of": {("flags", ACQUIRE)},
    "gather": GATHERS,
    "poll": {("flags", ACQUIRE), ("control", ACQUIRE)},
    "poll_counter": {("counters", ACQUIRE), ("taken", DEVICE_ACQUIRE)},
    "post": POSTS,
    "post_at": POSTS,
    "post_block": POSTS,
    "post_block_at": POSTS,
    "post_counted": POSTS,
    "post_counted_at": POSTS,
    "post_gather": POSTS,
    "pull": PULLS,
    "pull_at": PULLS,
    "pull_block": PULLS,
    "pull_block_at": PULLS,
    "pull_warp": PULLS,
    "pull_warp_at": PULLS,
    "share": set(),
    "stream_close": WAITS,
    "stream_next": PULLS,
    "stream_open": PULLS,
    "stream_open_from": PULLS,
    "try_post": TRIES,
    "try_post_at": TRIES,
    "wait": WAITS,
    "wait_block": WAITS,
    "wait_counter": COUNTS,
    "wait_counter_block": COUNTS,
    "wait_counter_for": COUNTS,
    "wait_for": WAITS,
    "wait_gather": GATHERS,
    "wait_warp": WAITS,
}
"""What each function must do: (array, how[, "in a loop"])."""


def test_every_function_for_kernels_is_judged_here():
    assert sorted(MUST) == sorted(kernels.__all__)


def keep(results: Any, position: Any, value: Any) -> None:
    """Store whatever a function returns, so that nothing of it is dropped as unused."""


@overload(keep, strict=False)
def _(results, position, value):
    if isinstance(value, types.BaseTuple):
        parts = [f"    keep(results, position + {i}, value[{i}])\n" for i in range(len(value))]
        scope: dict[str, Any] = {"keep": keep}
        exec("def keep_all(results, position, value):\n" + "".join(parts), scope)
        return scope["keep_all"]
    if isinstance(value, types.NoneType):
        return lambda results, position, value: None

    if isinstance(value, types.Array):

        def keep_array(results, position, value):
            results[position] = value.size

        return keep_array

    def keep_integer(results, position, value):
        results[position] = value

    return keep_integer


_TYPES_OF_PARAMETERS = {
    "q": QUEUE,
    "stream": STREAM,
    "table": types.NamedTuple([types.int64] * len(gpuq.Table._fields), gpuq.Table),
    "indices": INTEGERS,
    "statuses": INTEGERS,
}


@functools.cache
def compiled(name: str) -> Compiled:
    """Compile a kernel that calls one function with all its arguments and keeps its results."""
    function = getattr(kernels, name)
    if name == "bind":
        function = gpuq.bind(source=HANDLE, destination=HANDLE)
    parameters = list(inspect.signature(function).parameters)
    arguments: dict[str, Any] = {
        parameter: _TYPES_OF_PARAMETERS.get(parameter, types.int64) for parameter in parameters
    }
    arguments["results"] = INTEGERS
    call = f"function({', '.join(parameters)})"
    source = f"def kernel({', '.join(arguments)}):\n    keep(results, 0, {call})\n"
    scope: dict[str, Any] = {"function": function, "keep": keep}
    exec(source, scope)
    return Compiled(scope["kernel"], arguments)


@pytest.mark.parametrize("capability", CAPABILITIES, ids=CAPABILITY_IDS)
@pytest.mark.parametrize("name", sorted(kernels.__all__))
def test_memory_is_accessed_as_the_design_says(name, capability):
    ptx = compiled(name).ptx(capability)
    assert faults(ptx) == []
    for array, opcode, *where in MUST.get(name, ()):
        assert opcode in (ptx.in_loops(array) if where else ptx.opcodes(array)), array
    assert "sm_{}{}".format(*capability) in ptx.text


@pytest.mark.parametrize("capability", CAPABILITIES, ids=CAPABILITY_IDS)
@pytest.mark.parametrize("name", sorted(kernels.__all__))
def test_it_assembles_to_machine_code(name, capability):
    assert compiled(name).cubin(capability).startswith(b"\x7fELF")


@pytest.mark.parametrize("capability", CAPABILITIES, ids=CAPABILITY_IDS)
@pytest.mark.parametrize(
    "name", [name for name in kernels.__all__ if name.startswith(("pull_block", "wait_block"))]
)
def test_block_forms_have_a_barrier_between_the_wait_and_the_answer(name, capability):
    ptx = compiled(name).ptx(capability)
    barriers = [i for i in ptx.instructions if re.match(r"(bar|barrier)\.sync", i.opcode)]
    (result,) = [i for i in ptx.accesses("results") if i.is_store]
    assert any(ptx.is_behind(result, barrier) for barrier in barriers)


@pytest.mark.parametrize("capability", CAPABILITIES, ids=CAPABILITY_IDS)
@pytest.mark.parametrize("name", [name for name in kernels.__all__ if "warp" in name])
def test_warp_forms_join_their_lanes_between_the_wait_and_the_answer(name, capability):
    ptx = compiled(name).ptx(capability)
    joins = [i for i in ptx.instructions if i.opcode.startswith("bar.warp.sync")]
    (result,) = [i for i in ptx.accesses("results") if i.is_store]
    assert any(ptx.is_behind(result, join) for join in joins)
    assert any(i.opcode.startswith("shfl.sync") for i in ptx.instructions)


_TYPES_IN_BODIES = {
    "q": QUEUE,
    "rows": types.Array(types.int64, 2, "C"),
    "sums": types.Array(types.int64, 2, "C"),
    "tile": types.Array(types.uint8, 1, "C"),
    "words": WORDS,
    "answers": WORDS,
    "times_ns": INTEGERS,
}


BODIES_ON_A_GPU = [
    body
    for body in vars(gpu).values()
    if inspect.isfunction(body) and next(iter(inspect.signature(body).parameters), "") == "index"
]


@pytest.mark.parametrize("capability", [CAPABILITIES[0], CAPABILITIES[-1]], ids=["7.5", "12.0"])
@pytest.mark.parametrize("body", BODIES_ON_A_GPU, ids=lambda body: body.__name__)
def test_the_bodies_of_the_tests_on_a_gpu_assemble(body, capability):
    """So that those tests do not fail where a GPU is at hand for want of having been compiled."""
    parameters = list(inspect.signature(body).parameters)[2:]
    shape = types.Array(types.int64, 2 if "sums" in parameters else 1, "C")
    handed = [
        shape if name == "statuses" else _TYPES_IN_BODIES.get(name, types.int64)
        for name in parameters
    ]
    kernel = cuda_kernel(body).py_func
    assert Compiled(kernel, {"arguments": types.Tuple(handed)}).cubin(capability)


def test_the_bodies_of_the_tests_on_a_gpu_were_found():
    assert len(BODIES_ON_A_GPU) == 10


# --- what is read before and after -------------------------------------------------------------


def _reads_around_a_wait(q, tile, results):
    results[0] = tile[0]
    while load_acquire(q.flags, 0) == as_word(0):
        relax(0)
    results[1] = tile[0]


def _reads_around_a_pull(q, source, destination, tile, results):
    results[0] = tile[0]
    if gpuq.pull(q, source, destination, 0, 8, 0) == 0:
        results[1] = tile[0]


@pytest.mark.parametrize("capability", CAPABILITIES, ids=CAPABILITY_IDS)
def test_the_destination_is_read_again_after_an_acquire(capability):
    kernel = Compiled(
        _reads_around_a_wait, {"q": QUEUE, "tile": INTEGERS, "results": INTEGERS}
    ).ptx(capability)
    first, second = kernel.accesses("tile")
    polls = kernel.accesses("flags")
    assert all(kernel.is_behind(poll, first) for poll in polls)
    assert any(kernel.is_behind(second, poll) for poll in polls)
    assert ".nc" not in kernel.text


@pytest.mark.parametrize("capability", CAPABILITIES, ids=CAPABILITY_IDS)
def test_the_destination_is_read_again_after_a_pull(capability):
    integer = types.int64
    kernel = Compiled(
        _reads_around_a_pull,
        {"q": QUEUE, "source": integer, "destination": integer, "tile": INTEGERS,
         "results": INTEGERS},
    ).ptx(capability)  # fmt: skip
    assert len(kernel.accesses("tile")) == 2
    assert ".nc" not in kernel.text


# --- the rules can fail ------------------------------------------------------------------------


def _polls_by_index(q, results):
    while q.flags[0] == 0:
        pass
    results[0] = 1


def _polls_by_index_and_rests(q, results):
    while q.flags[0] == 0:
        relax(0)
    results[0] = 1


def _polls_at_device_scope(q, results):
    while load_acquire_device(q.flags, 0) == as_word(0):
        if load_acquire(q.control, 0) != as_word(1):
            break
    results[0] = 1


def _polls_for_ever(q, results):
    while load_acquire(q.flags, 0) == as_word(0):
        relax(0)
    results[0] = 1


def _publishes_relaxed(q, results):
    for word in range(1, 8):
        q.submissions[word] = as_word(word)
    store_relaxed(q.submissions, SEQUENCE, as_word(1))


def _publishes_by_index(q, results):
    for word in range(1, 8):
        q.submissions[word] = as_word(word)
    q.submissions[SEQUENCE] = as_word(1)


def _publishes_too_early(q, results):
    q.submissions[SOURCE] = as_word(1)
    store_release(q.submissions, SEQUENCE, as_word(1))
    q.submissions[DESTINATION] = as_word(1)


def _writes_a_flag(q, results):
    store_release(q.flags, 0, as_word(1))


@pytest.mark.parametrize("capability", [CAPABILITIES[0], CAPABILITIES[-1]], ids=["7.5", "12.0"])
@pytest.mark.parametrize(
    ("body", "what"),
    [
        (_polls_by_index, "loads nothing that others change"),
        (_polls_by_index_and_rests, "on flags"),
        (_polls_at_device_scope, "ld.acquire.gpu.b64 on flags"),
        (_polls_for_ever, "looks neither at STATE nor at a clock"),
        (_publishes_relaxed, "st.relaxed.sys.b64 on submissions"),
        (_publishes_by_index, "a submission is written by"),
        (_publishes_too_early, "a submission is written by"),
        (_writes_a_flag, "st.release.sys.b64 on flags"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_the_rules_find_a_kernel_that(body, what, capability):
    kernel = Compiled(body, {"q": QUEUE, "results": INTEGERS})
    assert any(what in fault for fault in faults(kernel.ptx(capability)))


class _Mutated(Compiled):
    """A kernel whose PTX was changed by hand."""

    def __init__(self, original: Compiled, pattern: str, replacement: str) -> None:
        self.original = original
        self.parameters = original.parameters
        self.change = (pattern, replacement)
        self._parsed = {}

    def text(self, capability: tuple[int, int]) -> str:
        pattern, replacement = self.change
        text, count = re.subn(pattern, replacement, self.original.text(capability), count=1)
        assert count == 1, "nothing to change"
        return text


@pytest.mark.parametrize("capability", [CAPABILITIES[0], CAPABILITIES[-1]], ids=["7.5", "12.0"])
@pytest.mark.parametrize(
    ("pattern", "replacement"),
    [
        (r"ld\.acquire\.sys\.b64", "ld.acquire.gpu.b64"),
        (r"ld\.acquire\.sys\.b64", "ld.relaxed.sys.b64"),
        (r"ld\.acquire\.sys\.b64", "ld.global.nc.b64"),
        (r"ld\.acquire\.sys\.b64", "ld.volatile.b64"),
        (r"ld\.acquire\.gpu\.b64", "ld.acquire.cta.b64"),
        (r"st\.release\.sys\.b64", "st.release.gpu.b64"),
        (r"st\.release\.sys\.b64", "st.relaxed.sys.b64"),
        (r"atom\.acq_rel\.gpu\.cas", "atom.relaxed.gpu.cas"),
        (r"st\.global\.([bu])64(\s+\[%rd\d+\+8\])", r"st.global.\g<1>32\2"),
        (r"st\.global\.([bu])64(\s+\[%rd\d+\+16\])", r"st.global.\g<1>8\2"),
    ],
)
def test_the_rules_find_a_change_of_one_instruction(pattern, replacement, capability):
    """In `pull`, whose PTX is right as it is."""
    assert faults(compiled("pull").ptx(capability)) == []
    assert faults(_Mutated(compiled("pull"), pattern, replacement).ptx(capability)) != []


def test_what_an_unused_array_type_is_for():
    """An access that is found to touch no array of the queue escapes no rule by its name."""
    kernel = Compiled(_polls_by_index_and_rests, {"q": QUEUE, "results": WORDS})
    ptx = kernel.ptx(CAPABILITIES[0])
    for instruction in ptx.instructions:
        if instruction.is_memory:
            assert ptx.array_of(instruction) in {"flags", "control", "results"}
