"""The settings: what they may be, where they come from, and how a wrong one is told."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

import gpuq
from gpuq import LoaderConfig

VARIABLES = ("GPUQ_TARGET", "GPUQ_READER", "GPUQ_DIRECT")


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("target", "gpu"),
        ("reader", "uring"),
        ("direct", True),
        ("slots", 0),
        ("slots", 3),
        ("slots", 1 << 21),
        ("slots", 4.0),
        ("slots", True),
        ("staging_buffers", 0),
        ("staging_bytes", 0),
        ("staging_bytes", 512),
        ("staging_bytes", 4097),
        ("staging_bytes", 1 << 31),
        ("sources", 0),
        ("destinations", -1),
        ("reader_threads", 0),
        ("post_timeout_ns", -1),
        ("post_timeout_ns", 1 << 63),
    ],
)
def test_a_value_out_of_its_range_is_told_by_name(name: str, value: Any) -> None:
    with pytest.raises(gpuq.ConfigError, match=name):
        LoaderConfig(**{name: value})
    with pytest.raises(gpuq.ConfigError, match=name):
        gpuq.Loader(**{name: value})


def test_an_unknown_setting_is_told_with_those_there_are() -> None:
    with pytest.raises(gpuq.ConfigError, match=r"unknown setting 'slot'.*slots"):
        gpuq.Loader(slot=4)


def test_a_config_and_single_settings_exclude_each_other() -> None:
    with pytest.raises(gpuq.ConfigError, match="either"):
        gpuq.Loader(LoaderConfig(), slots=4)


def test_a_config_is_frozen_and_can_be_copied() -> None:
    config = LoaderConfig(slots=8)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.slots = 16  # type: ignore[misc]
    assert dataclasses.replace(config, slots=16).slots == 16
    with pytest.raises(gpuq.ConfigError):
        dataclasses.replace(config, slots=17)


def test_keywords_come_before_the_environment_and_that_before_defaults(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert LoaderConfig.from_environment().reader == "auto"
    monkeypatch.setenv("GPUQ_READER", "threads")
    monkeypatch.setenv("GPUQ_DIRECT", "off")
    monkeypatch.setenv("GPUQ_TARGET", "")
    config = LoaderConfig.from_environment(direct="require", target=None)
    assert (config.reader, config.direct, config.target) == ("threads", "require", "auto")
    with gpuq.Loader(target="cpu", slots=4, staging_buffers=1, staging_bytes=4096) as loader:
        assert loader.statistics().reader == "threads"


@pytest.mark.parametrize("name", VARIABLES)
def test_a_wrong_variable_is_told_by_its_name(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "nonsense")
    with pytest.raises(gpuq.ConfigError, match=name):
        LoaderConfig.from_environment()
    # Whoever says it by keyword does not hear of the variable.
    setting = name.removeprefix("GPUQ_").lower()
    assert getattr(LoaderConfig.from_environment(**{setting: "auto"}), setting) == "auto"


def test_the_simulator_must_be_chosen_before_python_starts() -> None:
    with pytest.raises(gpuq.TargetUnavailableError, match="NUMBA_ENABLE_CUDASIM=1"):
        gpuq.Loader(target="simulator")
