"""The PTX of the kernel functions, where the source can lie: loads inside loops, order, widths.

No GPU is needed. The negative control is a poll by plain indexing, which the compiler turns into
one load and an endless jump: the same checks must refuse it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from numba import typeof, types
from stepping import bare_queue

import gpuq

pytest.importorskip("cuda.bindings.nvvm", reason="PTX is made by NVVM (numba-cuda[cu13])")

from numba import cuda
from numba.cuda import dispatcher

CAPABILITIES = [(7, 5), (9, 0), (12, 0)]
WORD = types.int64
QUEUE = typeof(bare_queue(8))
OUT = types.int64[::1]
BYTES = types.uint8[::1]


def post(q, out, source, destination, offset, start, end, tag):
    out[0] = gpuq.post_at(q, source, destination, offset, start, end, tag)


def try_post(q, out, source, destination, offset, start, end, tag):
    out[0] = gpuq.try_post_at(q, source, destination, offset, start, end, tag)


def poll(q, out, ticket):
    out[0] = gpuq.poll(q, ticket)


def wait(q, out, ticket):
    out[0] = gpuq.wait(q, ticket)


def wait_for(q, out, ticket, timeout_ns):
    out[0] = gpuq.wait_for(q, ticket, timeout_ns)


def pull(q, out, data, source, destination, start, end, tag):
    out[0] = data[0]
    out[1] = gpuq.pull(q, source, destination, start, end, tag)
    out[2] = data[0]


def plain_wait(q, out, ticket):
    while q.flags[ticket & 7] == 0:
        pass
    out[0] = 1


def plain_post(q, out, source, destination, offset, start, end, tag):
    words = q.submissions
    words[1] = source
    words[2] = destination
    words[0] = tag


SIGNATURES: dict[Callable[..., Any], tuple[Any, ...]] = {
    post: (QUEUE, OUT, *[WORD] * 6),
    try_post: (QUEUE, OUT, *[WORD] * 6),
    poll: (QUEUE, OUT, WORD),
    wait: (QUEUE, OUT, WORD),
    wait_for: (QUEUE, OUT, WORD, WORD),
    pull: (QUEUE, OUT, BYTES, *[WORD] * 5),
    plain_wait: (QUEUE, OUT, WORD),
    plain_post: (QUEUE, OUT, *[WORD] * 6),
}

each_capability = pytest.mark.parametrize("cc", CAPABILITIES, ids=lambda cc: f"sm{cc[0]}{cc[1]}")


def each_function(*functions: Callable[..., Any]) -> Any:
    return pytest.mark.parametrize("function", functions, ids=lambda f: f.__name__)


class StandIn:
    """What `compile_ptx` asks of the current device, which is not there."""

    compute_capability = (0, 0)


@functools.cache
def ptx_of(function: Callable[..., Any], cc: tuple[int, int]) -> str:
    before = dispatcher.get_current_device
    StandIn.compute_capability = cc
    dispatcher.get_current_device = lambda: StandIn
    try:
        ptx, _ = cuda.compile_ptx(function, SIGNATURES[function], cc=cc)
    finally:
        dispatcher.get_current_device = before
    return ptx  # type: ignore[no-any-return]


def instructions(ptx: str) -> list[str]:
    """Return labels and instructions of the kernel's body, one each, without comments."""
    body = ptx[ptx.index(".visible .entry") :]
    body = body[body.index("\n{") :]
    body = re.sub(r"//[^\n]*", "", body)
    lines = [line.strip().rstrip(";") for line in body.splitlines()]
    return [line for line in lines if line and not line.startswith((".", "{", "}"))]


def loops(lines: list[str]) -> Iterator[list[str]]:
    """Yield what stands between each backward branch and its label, both included."""
    labels = {line[:-1]: n for n, line in enumerate(lines) if line.endswith(":")}
    for n, line in enumerate(lines):
        branch = re.search(r"\bbra(?:\.uni)?\s+(\S+)$", line)
        if branch and labels[branch[1]] <= n:
            yield lines[labels[branch[1]] : n + 1]


def addresses(lines: list[str], instruction: str) -> list[str]:
    """Return the address registers of each use of an instruction."""
    pattern = re.compile(rf"^{re.escape(instruction)}\S*\s+\S+,\s*\[([^\]]+)\]")
    return [match[1] for line in lines if (match := pattern.match(line))]


def assert_polls_the_flag_and_the_state(lines: list[str]) -> None:
    """One loop acquires two words, at system scope, each time round."""
    acquired = [set(addresses(loop, "ld.acquire.sys.b64")) for loop in loops(lines)]
    assert any(len(found) >= 2 for found in acquired), acquired


def assert_publishes_by_one_release_behind_the_payload(lines: list[str]) -> None:
    release = [n for n, line in enumerate(lines) if line.startswith("st.release.sys.b64")]
    assert len(release) == 1, release
    # From the label before it to the release: the seven other words of the submission.
    begin = max(n for n, line in enumerate(lines[: release[0]]) if "bra" in line or line[-1] == ":")
    stores = [line for line in lines[begin : release[0]] if line.startswith("st.")]
    assert sum(4 if ".v4" in s else 2 if ".v2" in s else 1 for s in stores) == 7, stores


def assert_no_narrow_store_and_no_cached_load(lines: list[str]) -> None:
    for line in lines:
        if line.startswith("st.") and not line.startswith(("st.param", "st.local")):
            assert re.match(r"st\.\S*(b64|u64|s64)\b", line), line
        assert not re.match(r"ld\.\S*nc\b", line), line


@each_capability
@each_function(wait, wait_for, pull)
def test_a_wait_loads_the_flag_again_each_time_round(function: Any, cc: Any) -> None:
    assert_polls_the_flag_and_the_state(instructions(ptx_of(function, cc)))


@each_capability
@each_function(wait, wait_for, pull)
def test_a_wait_sleeps_between_two_looks(function: Any, cc: Any) -> None:
    lines = instructions(ptx_of(function, cc))
    assert any(
        any(line.startswith("nanosleep") for line in loop)
        and len(set(addresses(loop, "ld.acquire.sys.b64"))) >= 2
        for loop in loops(lines)
    )


@each_capability
def test_a_poll_looks_once(cc: Any) -> None:
    lines = instructions(ptx_of(poll, cc))
    assert addresses(lines, "ld.acquire.sys.b64")
    assert not list(loops(lines))
    assert not any(line.startswith("atom") for line in lines), "it consumes nothing"


@each_capability
@each_function(post, pull)
def test_a_post_that_waits_looks_at_turn_and_state_each_time_round(function: Any, cc: Any) -> None:
    lines = instructions(ptx_of(function, cc))
    found = [
        loop
        for loop in loops(lines)
        if addresses(loop, "ld.acquire.gpu.b64")
        and addresses(loop, "ld.acquire.sys.b64")
        and any("atom.acq_rel.gpu.cas.b64" in line for line in loop)
        and any("%globaltimer" in line for line in loop)
    ]
    assert found, "no loop looks at a turn, the state and the clock"


@each_capability
@each_function(post, try_post, pull)
def test_a_post_publishes_last(function: Any, cc: Any) -> None:
    assert_publishes_by_one_release_behind_the_payload(instructions(ptx_of(function, cc)))


@each_capability
@each_function(post, try_post, poll, wait, wait_for, pull)
def test_words_are_stored_whole_and_nothing_is_read_through_a_cache(function: Any, cc: Any) -> None:
    assert_no_narrow_store_and_no_cached_load(instructions(ptx_of(function, cc)))


@each_capability
@each_function(post, try_post, wait, wait_for, pull)
def test_words_of_the_bus_are_never_changed_by_read_modify_write(function: Any, cc: Any) -> None:
    atomics = [line for line in instructions(ptx_of(function, cc)) if line.startswith("atom")]
    assert atomics
    for line in atomics:
        assert re.match(r"atom\.acq_rel\.gpu\.(cas\.b64|add\.u64)", line), line


@each_capability
def test_bytes_are_read_again_after_the_pull(cc: Any) -> None:
    lines = instructions(ptx_of(pull, cc))
    loads = [n for n, line in enumerate(lines) if re.match(r"ld\.global\.[busr]8", line)]
    last_acquire = max(n for n, line in enumerate(lines) if line.startswith("ld.acquire.sys"))
    assert len(loads) == 2
    assert loads[0] < last_acquire < loads[1]


@each_capability
@each_function(plain_wait)
def test_a_poll_by_plain_indexing_is_refused(function: Any, cc: Any) -> None:
    lines = instructions(ptx_of(function, cc))
    with pytest.raises(AssertionError):
        assert_polls_the_flag_and_the_state(lines)
    # And for the reason that is known: its loop loads nothing.
    assert not any(line.startswith("ld.") for loop in loops(lines) for line in loop)


@each_capability
@each_function(plain_post)
def test_a_post_by_plain_stores_is_refused(function: Any, cc: Any) -> None:
    with pytest.raises(AssertionError):
        assert_publishes_by_one_release_behind_the_payload(instructions(ptx_of(function, cc)))


@each_capability
@each_function(post, try_post, poll, wait, wait_for, pull)
def test_it_assembles(function: Any, cc: Any) -> None:
    core = pytest.importorskip("cuda.core")
    code = core.ObjectCode.from_ptx(ptx_of(function, cc).encode())
    options = core.LinkerOptions(arch=f"sm_{cc[0]}{cc[1]}")
    cubin = core.Linker(code, options=options).link("cubin")
    assert cubin.code[:4] == b"\x7fELF"
