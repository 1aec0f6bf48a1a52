"""Aborting NCCL's collectives; groups and events are stand-ins."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from foretrain.comm.coordinator.protocol import CollectiveCommand
from foretrain.plugins.torch import process_group_executor as module
from foretrain.plugins.torch.gradient_buffer import GradientBuffer
from foretrain.plugins.torch.process_group_executor import ProcessGroupExecutor
from foretrain.plugins.torch.streams import HostStreams, abort
from foretrain.tasks import Chunk, Piece, Task

CUDA = torch.device("cuda", 0)
PATIENCE = 20.0
"""Seconds until a test that hangs fails instead."""


class Group:
    """A process group, and its own backend for any device."""

    def __init__(self, abort: Callable[[], object], name: str = "nccl") -> None:
        self.abort, self._name = abort, name
        self.reduced: list[torch.Tensor] = []

    def _get_backend(self, device: torch.device) -> Group:
        return self

    def name(self) -> str:
        return self._name

    def allreduce(self, tensors: list[torch.Tensor], options: object) -> Group:
        self.reduced += tensors
        return self

    def wait(self) -> bool:
        """Only the stream waits."""
        return True


def test_communicators_that_wait_for_each_other_are_aborted_all_the_same() -> None:
    met = threading.Barrier(3)
    groups: list[Any] = [Group(lambda: met.wait(PATIENCE)) for _ in range(2)]
    abort(CUDA, *groups)
    assert met.wait(PATIENCE) in range(3)
    assert not met.broken


def test_what_cannot_be_aborted_is_let_be() -> None:
    asked, done = threading.Event(), threading.Event()

    def refuse() -> None:
        asked.set()
        raise RuntimeError("it was aborted before")

    groups: list[Any] = [Group(refuse), Group(done.set)]
    abort(CUDA, *groups)
    assert asked.wait(PATIENCE)
    assert done.wait(PATIENCE)


@pytest.mark.parametrize(("device", "name"), [("cuda", "gloo"), ("cpu", "gloo"), ("cpu", "nccl")])
def test_only_nccl_is_aborted(device: str, name: str) -> None:
    before = threading.active_count()
    group: Any = Group(pytest.fail, name)
    abort(torch.device(device), group)
    assert threading.active_count() == before


def test_the_thread_that_waits_for_an_event_of_a_lost_operation_ends_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    reached, waits = threading.Event(), threading.Event()

    class Streams(HostStreams):
        def arrived(self) -> Any:
            class Mark:
                def synchronize(self) -> None:
                    waits.set()
                    assert reached.wait(PATIENCE)

            return Mark()

    monkeypatch.setattr(module, "enqueues", lambda group, device: True)
    monkeypatch.setattr(module, "coalesces", lambda group, device: True)
    task = Task(0, "weight", 16, 0)
    gradients = GradientBuffer([nn.Parameter(torch.zeros(4))], [0])
    group: Any = Group(reached.set)
    landed: list[int] = []
    operations = module.GroupOperations(group, torch.device("cpu"), 2)
    carrier = ProcessGroupExecutor(
        gradients, [task], operations, Streams(), None, lambda task, used: landed.append(task), lambda error: None
    )
    carrier.start(CollectiveCommand(0, Chunk("all_reduce", (Piece(0, 0, 16),), 16)), lambda order: None)
    assert waits.wait(PATIENCE)
    assert landed == [0]
    abort(CUDA, group)
    carrier.close()
    assert not carrier._thread.is_alive()
