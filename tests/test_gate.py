"""Gate kernels: held until the host opens them, never for ever; compiled, simulated, and as PTX."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from conftest import WAIT_SECONDS, until

from gpuq.kernels import gate as gates
from gpuq.layout import CONTROL_WORDS, STATE, State, Status

LONG_NS = int(WAIT_SECONDS * 1e9)
BODIES = [
    pytest.param(gates.pass_gate, id="plain"),
    pytest.param(gates.pass_gate_on_cpu, id="compiled"),
]


def make_gate() -> gates.Gate:
    return gates.Gate(
        np.zeros(gates.GATE_WORDS, dtype=np.uint64), np.zeros(CONTROL_WORDS, dtype=np.uint64)
    )


def begin(body: Callable[..., Any], gate: gates.Gate, *numbers: int) -> threading.Thread:
    """Pass gates in a thread, which stands for a stream."""

    def stream() -> None:
        for number in numbers:
            body(gate, number, LONG_NS)

    thread = threading.Thread(target=stream, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize("body", BODIES)
def test_a_stream_is_held_at_each_gate_until_that_is_opened(body: Callable[..., Any]) -> None:
    gate = make_gate()
    thread = begin(body, gate, 1, 2)
    for number in (1, 2):
        until(lambda: gates.has_reached(gate.words, number))  # noqa: B023
        assert gates.outcome_of(gate.words, number) == Status.PENDING
        assert not gates.has_reached(gate.words, number + 1)
        gates.open_gate(gate.words, number)
    thread.join(WAIT_SECONDS)
    assert gates.outcome_of(gate.words, 2) == Status.OK


@pytest.mark.parametrize("body", BODIES)
def test_an_open_gate_holds_nothing(body: Callable[..., Any]) -> None:
    gate = make_gate()
    gates.open_gate(gate.words, 3)
    gates.open_gate(gate.words, 1)  # does not shut the others again
    assert [body(gate, number, 0) for number in (1, 2, 3)] == [Status.OK] * 3
    assert body(gate, 4, 0) == Status.TIMED_OUT


@pytest.mark.parametrize("body", BODIES)
def test_a_gate_that_nobody_opens_is_left_when_the_time_is_over(body: Callable[..., Any]) -> None:
    gate = make_gate()
    assert body(gate, 1, 1_000_000) == Status.TIMED_OUT
    assert gates.outcome_of(gate.words, 1) == Status.TIMED_OUT
    assert body(gate, 1, -5) == Status.TIMED_OUT


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("state", [State.CLOSED, State.ABORTED])
def test_the_end_of_the_queue_ends_the_wait(body: Callable[..., Any], state: State) -> None:
    gate = make_gate()
    gate.control[STATE] = State.CLOSING
    thread = begin(body, gate, 1)
    until(lambda: gates.has_reached(gate.words, 1))
    gate.control[STATE] = state
    thread.join(WAIT_SECONDS)
    assert gates.outcome_of(gate.words, 1) == Status.ABORTED


SIMULATED = """
import threading, time
import numpy as np
from gpuq.kernels import gate as gates
from gpuq.layout import CONTROL_WORDS

gate = gates.Gate(
    np.zeros(gates.GATE_WORDS, dtype=np.uint64), np.zeros(CONTROL_WORDS, dtype=np.uint64)
)
kernel = gates.gate_kernel()
stream = threading.Thread(target=lambda: kernel[1, 1](gate, 1, 60_000_000_000), daemon=True)
stream.start()
deadline = time.monotonic() + 60
while not gates.has_reached(gate.words, 1):
    assert time.monotonic() < deadline
    time.sleep(0.001)
print(gates.outcome_of(gate.words, 1).name)
gates.open_gate(gate.words, 1)
stream.join(60)
print(gates.outcome_of(gate.words, 1).name)
kernel[1, 1](gate, 2, 1000)
print(gates.outcome_of(gate.words, 2).name)
"""


def test_the_kernel_runs_in_the_simulator() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SIMULATED],
        capture_output=True,
        text=True,
        env=os.environ | {"NUMBA_ENABLE_CUDASIM": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["PENDING", "OK", "TIMED_OUT"]


PTX = """
import sys
from numba import types
from numba.cuda import dispatcher
from numba.cuda import compile_ptx

class Device:
    compute_capability = tuple(int(digit) for digit in sys.argv[1:])

dispatcher.get_current_device = lambda: Device
from gpuq.kernels import gate as gates

words = types.Array(types.uint64, 1, "C")
gate = types.NamedUniTuple(words, 2, gates.Gate)
ptx, _ = compile_ptx(
    gates.gate_kernel().py_func,
    (gate, types.int64, types.int64),
    cc=Device.compute_capability,
)
print(ptx)
"""


@pytest.mark.parametrize("capability", ["7 5", "9 0", "12 0"])
def test_the_kernel_looks_at_the_gate_and_at_the_state_in_each_turn_of_its_loop(
    capability: str,
) -> None:
    pytest.importorskip("cuda.bindings.nvvm", reason="the nvvm and nvrtc wheels are not there")
    done = subprocess.run(
        [sys.executable, "-c", PTX, *capability.split()], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    lines = [line.strip() for line in done.stdout.splitlines()]
    assert any(f"sm_{capability.replace(' ', '')}" in line for line in lines)
    labels = {line[:-1]: at for at, line in enumerate(lines) if line.endswith(":")}
    jumps = [
        (labels[target], at)
        for at, line in enumerate(lines)
        if "bra" in line and (target := line.rstrip(";").split()[-1]) in labels
    ]
    loops = [(begin, end) for begin, end in jumps if begin < end]
    loads = [at for at, line in enumerate(lines) if line.startswith("ld.acquire.sys")]
    assert len(loads) == 2
    assert any(begin < min(loads) and max(loads) < end for begin, end in loops)
    stores = [line for line in lines if line.startswith("st.release.sys")]
    assert len(stores) == 2, "REACHED and OUTCOME"
