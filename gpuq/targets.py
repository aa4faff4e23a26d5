"""Where kernels run: which device a target names on this machine, and why."""

from __future__ import annotations

from gpuq.compiling import SIMULATED
from gpuq.errors import TargetUnavailableError
from gpuq.host.device import CpuDevice, Device, SimulatorDevice


def choose_device(target: str) -> tuple[Device, str]:
    """Return the device for a target and why it was taken.

    Raises
    ------
    TargetUnavailableError
        The target that was asked for does not work here.
    """
    if target == "cpu":
        return CpuDevice(), 'target="cpu" was asked for'
    if SIMULATED:
        if target == "cuda":
            raise TargetUnavailableError(
                'target="cuda": NUMBA_ENABLE_CUDASIM=1 replaces CUDA by the simulator'
            )
        return SimulatorDevice(), "NUMBA_ENABLE_CUDASIM=1 is set"
    if target == "simulator":
        raise TargetUnavailableError(
            'target="simulator": set NUMBA_ENABLE_CUDASIM=1 before Python starts'
        )
    from gpuq.host.cuda_device import CudaDevice

    try:
        device = CudaDevice()
    except TargetUnavailableError as error:
        if target == "cuda":
            raise TargetUnavailableError(f'target="cuda": {error}') from None
        return CpuDevice(), f"no usable GPU: {error}"
    asked = 'target="cuda" was asked for' if target == "cuda" else "a usable GPU is there"
    return device, f"{asked}: {device.facts.name}"
