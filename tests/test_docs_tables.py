"""Tables in the docs that name every setting, status and exception: none missing, none wrong."""

import dataclasses
import re
from pathlib import Path

import gpuq

DOCS = Path(__file__).parent.parent / "docs"


def first_column(page, heading):
    section = (DOCS / page).read_text().split(heading, 1)[1].split("\n## ")[0]
    cells = re.findall(r"^\| (`[^|]*) \|", section, re.M)
    return [name for cell in cells for name in re.findall(r"`(\w+)`", cell)]


def test_every_setting_is_listed_with_its_default_and_variable():
    rows = re.findall(
        r"^\| `(\w+)` \| (?:`(\w+)`)? ?\| `(\w+)` \|", (DOCS / "settings.md").read_text(), re.M
    )
    fields = {field.name: str(field.default) for field in dataclasses.fields(gpuq.LoaderConfig)}
    assert {name: default for name, _, default in rows} == fields
    assert {name: variable for name, variable, _ in rows if variable} == gpuq.config.VARIABLES


def test_every_status_is_listed():
    assert sorted(first_column("errors.md", "## Statuses")) == sorted(
        status.name for status in gpuq.Status
    )


def test_every_exception_is_listed():
    exceptions = [
        name
        for name, value in vars(gpuq).items()
        if isinstance(value, type) and issubclass(value, gpuq.GpuqError)
    ]
    assert sorted([*first_column("errors.md", "## Exceptions"), "GpuqError"]) == sorted(exceptions)
