"""Agreements before the first step, where one process can play all ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from foretrain.errors import ConfigError
from foretrain.plugins.torch.process_groups import refuse_blocking_waits

BLOCKING = ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT")


def control(enqueues: bool = True, others: bool = True) -> Any:
    """The control group of a rank whose backend is NCCL, or is not; the ``others`` answer alike."""
    return SimpleNamespace(enqueues=enqueues, all_true=lambda value: value and others)


@pytest.fixture(autouse=True)
def nothing_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in BLOCKING:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(("name", "value"), [(BLOCKING[0], "1"), (BLOCKING[1], "true"), (BLOCKING[0], "Yes")])
def test_nccl_waits_that_block_the_host_are_refused(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=f"{name}: '{value}' makes the host wait .*; unset it on all ranks"):
        refuse_blocking_waits(control())
    refuse_blocking_waits(control(enqueues=False, others=False))  # gloo does not read it


def test_they_are_refused_on_all_ranks_if_one_has_them():
    with pytest.raises(ConfigError, match="TORCH_NCCL_BLOCKING_WAIT: 'set on another rank'"):
        refuse_blocking_waits(control(others=False))


@pytest.mark.parametrize("value", ["", "0", "false"])
def test_waits_of_streams_are_not(monkeypatch, value):
    monkeypatch.setenv(BLOCKING[0], value)
    refuse_blocking_waits(control())
