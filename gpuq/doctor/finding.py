"""What the checks of ``gpuq doctor`` answer with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

Verdict = Literal["yes", "degraded", "no", "unknown", "stops"]
"""Works; works with less than there could be; does not, and gpuq does without; not found out;
does not, and so what was asked for cannot run."""


@dataclass(frozen=True)
class Finding:
    """One line of the diagnosis.

    Attributes
    ----------
    name : str
        What was looked at.
    ok : {"yes", "degraded", "no", "unknown", "stops"}
    value : str
        What it is; may be empty.
    reason : str
        Why the verdict is what it is.
    advice : str
        What to do about it; empty where there is nothing to do.
    path : str
        The path that it is about; empty where it is about the machine.
    """

    name: str
    ok: Verdict
    value: str = ""
    reason: str = ""
    advice: str = ""
    path: str = ""


_SAID_CHARACTERS = 400


def obstacles(findings: Sequence[Finding]) -> list[str]:
    """Return a line for each finding that stops what was asked for; none where all can run."""
    return [
        ": ".join(part for part in (finding.path or finding.name, finding.reason) if part)
        for finding in findings
        if finding.ok == "stops"
    ]


def checked(name: str, check: Callable[[], list[Finding]], path: str = "") -> list[Finding]:
    """Return what a check found; one that cannot even be made is a finding too."""
    try:
        return check()
    except Exception as error:
        # What is the machine's is tried in the end all the same; a path is not.
        ok: Verdict = "stops" if path else "unknown"
        return [Finding(name, ok, "", f"the check failed: {say(error)}", path=path)]


def say(error: BaseException) -> str:
    """Return an error's message in one line."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    words = " ".join(str(error).split()) or type(error).__name__
    return words if len(words) <= _SAID_CHARACTERS else words[:_SAID_CHARACTERS] + " ..."
