"""The target that a loader would take, and the GPU, as the CUDA driver tells of it."""

from __future__ import annotations

import ctypes
import glob
import os
from pathlib import Path
from typing import Any

from gpuq.config import LoaderConfig
from gpuq.doctor.finding import Finding, say
from gpuq.errors import TargetUnavailableError
from gpuq.host.driver import SUCCESS, GpuFacts, gpu_facts, load_library, usable_gpu
from gpuq.targets import choose_device

_LOADING_MODES = {1: "EAGER", 2: "LAZY"}


def find_target(config: LoaderConfig) -> Finding:
    """Say where kernels would run, and why there."""
    try:
        device, reason = choose_device(config.target)
    except TargetUnavailableError as error:
        return Finding(
            "target", "stops", config.target, say(error), "unset GPUQ_TARGET, or set it to auto"
        )
    device.close()
    is_second_best = config.target == "auto" and device.name != "cuda"
    return Finding("target", "degraded" if is_second_best else "yes", device.name, reason)


def find_gpu(loading: str | None) -> list[Finding]:
    """Say what the CUDA driver says; `loading` is CUDA_MODULE_LOADING as the user set it."""
    try:
        library = load_library()
    except TargetUnavailableError as error:
        return [_no_driver(say(error)), _module_loading(loading, None)]
    return examine_gpu(library, loading)


def _no_driver(reason: str) -> Finding:
    if any(_is_nvidia_gpu(device) for device in glob.glob("/sys/bus/pci/devices/*")):
        advice = (
            "an NVIDIA GPU is on the PCI bus: install NVIDIA's driver; in a container, start it "
            "with access to the GPU (docker run --gpus all)"
        )
    else:
        advice = "nothing, without an NVIDIA GPU (none is on the PCI bus): kernels run on the CPU"
    return Finding("CUDA driver", "no", "", reason, advice)


def _is_nvidia_gpu(device: str) -> bool:
    try:
        vendor = Path(device, "vendor").read_text().strip()
        kind = Path(device, "class").read_text().strip()
    except OSError:
        return False
    return vendor == "0x10de" and kind.startswith("0x03")


def examine_gpu(library: Any, loading: str | None = None) -> list[Finding]:
    """Return what a CUDA driver says of the GPU that a loader would take.

    Parameters
    ----------
    library : object
        The driver: its functions as attributes, called as by `ctypes`.
    loading : str, optional
        CUDA_MODULE_LOADING as the user set it.
    """
    try:
        facts = gpu_facts(library)
    except TargetUnavailableError as error:
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        advice = (
            f"CUDA_VISIBLE_DEVICES is {hidden!r}; see that it names a GPU"
            if hidden is not None
            else "see whether nvidia-smi works, and whether /dev/nvidia* may be opened"
        )
        return [
            Finding("CUDA driver", "no", "", say(error), advice),
            _module_loading(loading, None),
        ]
    release = _read_word("/sys/module/nvidia/version")
    version = "CUDA {}.{}".format(*facts.driver_version)
    findings = [Finding("CUDA driver", "yes", f"{release}, {version}" if release else version)]
    name = "{}, compute capability {}.{}".format(facts.name, *facts.compute_capability)
    try:
        usable_gpu(library)
        findings.append(Finding("GPU", "yes", name))
    except TargetUnavailableError as error:
        findings.append(
            Finding("GPU", "no", name, say(error), "take another GPU (CUDA_VISIBLE_DEVICES)")
        )
    findings.append(_mapped_memory(facts))
    findings.append(_time_limit(facts.has_kernel_time_limit))
    findings.append(_module_loading(loading, library))
    return findings


def _mapped_memory(facts: GpuFacts) -> Finding:
    name = "mapped memory"
    if not facts.can_map_host_memory:
        return Finding(name, "no", "", "kernels cannot reach memory of the host")
    if not facts.has_unified_addressing:
        return Finding(name, "no", "", "no unified addressing: kernels need other addresses for it")
    return Finding(name, "yes", "with unified addressing", "kernels reach memory of the host")


def _time_limit(has_limit: bool) -> Finding:
    if not has_limit:
        return Finding("kernel time limit", "yes", "off")
    return Finding(
        "kernel time limit",
        "degraded",
        "on",
        "kernels that run for some seconds are ended by the system, as this GPU drives a display",
        "keep each launch short, or take a GPU without a display",
    )


def _module_loading(variable: str | None, library: Any) -> Finding:
    """Judge CUDA_MODULE_LOADING: by the driver's own word where there is a driver."""
    value = "not set" if variable is None else variable
    if library is None:
        reason = "without a GPU it has no effect"
        return Finding("CUDA_MODULE_LOADING", "yes", value, reason)
    mode = _effective_loading(library)
    if mode == "LAZY" or (mode is None and (variable or "").upper() == "LAZY"):
        return Finding(
            "CUDA_MODULE_LOADING",
            "degraded",
            value,
            "kernels load when first launched, and that waits for kernels that run: a kernel that "
            "polls and a first launch can wait for each other",
            "unset it, or give every kernel to Loader.prepare before the first one runs",
        )
    reason = f"loading is {mode}" if mode else "the driver is too old to say"
    if variable is None and mode == "EAGER":
        reason += ": gpuq sets it for its own process"
    return Finding("CUDA_MODULE_LOADING", "yes", value, reason)


def _effective_loading(library: Any) -> str | None:
    ask = getattr(library, "cuModuleGetLoadingMode", None)  # CUDA 11.7
    mode = ctypes.c_int(0)
    if ask is None or ask(ctypes.byref(mode)) != SUCCESS:
        return None
    return _LOADING_MODES.get(mode.value)


def _read_word(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
