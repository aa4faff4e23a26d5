"""What ``gpuq soak`` does."""

from __future__ import annotations

import json
import random
import tempfile

from gpuq.report import open_console
from gpuq.soak.report import describe_soak, show_soak
from gpuq.soak.run import run_soak
from gpuq.version import __version__


def soak_loaders(seconds: float, seed: int | None, folder: str | None, as_json: bool) -> str | None:
    """Run a soak in a folder of its own and print it; return what is wrong.

    Raises
    ------
    OSError
        The files cannot be made.
    """
    chosen = random.SystemRandom().getrandbits(32) if seed is None else seed
    with tempfile.TemporaryDirectory(prefix="gpuq-soak-", dir=folder) as place:
        soak = run_soak(seconds, chosen, place)
    if as_json:
        print(json.dumps({"gpuq": __version__} | describe_soak(soak), indent=2))
    else:
        show_soak(open_console(), soak)
    return soak.fault
