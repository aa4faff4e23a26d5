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


def rows_of(heading):
    section = (DOCS / "errors.md").read_text().split(heading, 1)[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_every_status_says_what_it_means_and_what_it_leaves_behind():
    for row in rows_of("## Statuses"):
        assert len(row) == 5, row
        assert all(row), row


def test_every_exception_says_what_it_leaves_behind_and_what_to_do():
    for row in rows_of("## Exceptions"):
        assert len(row) == 5, row
        assert all(row), row


def test_every_variable_that_gpuq_looks_at_is_listed():
    sources = [path.read_text() for path in Path(gpuq.__file__).parent.rglob("*.py")]
    read = set(re.findall(r'"((?:GPUQ|NUMBA|CUDA)_[A-Z]+(?:_[A-Z]+)*)"', "\n".join(sources)))
    assert {"GPUQ_TARGET", "GPUQ_CACHE", "CUDA_LAUNCH_BLOCKING"} <= read
    page = (DOCS / "settings.md").read_text()
    assert not [
        name
        for name in sorted(read)
        if f"`{name}`" not in page and not name.startswith("CUDA_ERROR_")
    ]


def test_every_public_name_is_on_the_page_of_all_names():
    page = (DOCS / "api.md").read_text()
    listed = re.findall(r"^\.\. auto(?:class|function|data):: (\w+)(?:\(\))?$", page, re.M)
    exceptions = {
        name
        for name in gpuq.__all__
        if isinstance(getattr(gpuq, name), type) and issubclass(getattr(gpuq, name), gpuq.GpuqError)
    }
    assert ".. automodule:: gpuq.errors" in page
    assert sorted(listed) == sorted(set(gpuq.__all__) - exceptions - {"__version__"})
