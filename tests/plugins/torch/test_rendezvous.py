"""What ranks agree on before the first step, where one process can play them all."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

from foretrain.errors import ConfigError
from foretrain.plugins.torch import rendezvous

BLOCKING = ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT")


class Sideband:
    """That of a rank whose backend is NCCL, or is not; the ``others`` think the same of everything."""

    def __init__(self, enqueues: bool = True, others: bool = True) -> None:
        self.enqueues, self._others = enqueues, others

    def all_true(self, value: bool) -> bool:
        return value and self._others


@pytest.fixture(autouse=True)
def nothing_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in BLOCKING:
        monkeypatch.delenv(name, raising=False)


def refuse(sideband: Any) -> None:
    rendezvous.refuse_blocking_waits(sideband)


def refused(sideband: Any) -> bool:
    try:
        refuse(sideband)
    except ConfigError:
        return True
    return False


@pytest.mark.parametrize("name", BLOCKING)
@pytest.mark.parametrize("value", ["1", "true", "Yes"])
def test_waits_that_hold_the_host_are_refused(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=f"{name}: '{value}' makes the host wait .*; unset it on all ranks"):
        refuse(Sideband())


def test_they_are_refused_on_all_ranks_where_one_has_them():
    with pytest.raises(ConfigError, match="TORCH_NCCL_BLOCKING_WAIT: 'set on another rank'"):
        refuse(Sideband(others=False))


@pytest.mark.parametrize("value", [None, "", "0", "false", "no"])
def test_waits_of_streams_are_not(monkeypatch, value):
    if value is not None:
        monkeypatch.setenv(BLOCKING[0], value)
    assert not refused(Sideband())


def test_gloo_does_not_read_it(monkeypatch):
    monkeypatch.setenv(BLOCKING[0], "1")
    assert refused(Sideband())
    assert not refused(Sideband(enqueues=False, others=False))
