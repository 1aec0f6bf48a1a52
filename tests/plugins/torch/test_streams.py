"""Order of work on a GPU: events between streams. On a CPU nothing is to be done."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from foretrain.plugins.torch.streams import CudaStreams, HostStreams, streams

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; there is none here")
_LATE = 20_000_000
"""Clock cycles that a late stream spins, about 10 ms: nobody who does not wait is that slow by chance."""
_SIZE = 1 << 20


def test_a_cpu_gets_streams_that_do_nothing() -> None:
    assert type(streams(torch.device("cpu"), 3)) is HostStreams


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def _late(write: Callable[[], object]) -> None:
    """Puts ``write`` into the current stream, behind a long spin."""
    torch.cuda._sleep(_LATE)
    write()


def _arriving_late(device: torch.device) -> tuple[CudaStreams, torch.Tensor]:
    """Streams of one task, and its gradient: zeros, until ones arrive late."""
    found = CudaStreams(device, 1)
    gradient = torch.zeros(_SIZE, device=device)
    torch.cuda.synchronize(device)
    with found.arriving():
        _late(lambda: gradient.fill_(1))
    return found, gradient


def _seen(values: torch.Tensor) -> torch.Tensor:
    """What the current stream reads from ``values``."""
    seen = values.clone()
    torch.cuda.synchronize(values.device)
    return seen


@needs_cuda
def test_a_gpu_gets_streams_of_its_own(device: torch.device) -> None:
    found = streams(device, 1)
    assert isinstance(found, CudaStreams)
    model = torch.cuda.current_stream(device)
    with found.issuing([]):
        issue = torch.cuda.current_stream(device)
    with found.arriving():
        arrival = torch.cuda.current_stream(device)
    with found.updating([0], None):
        update = torch.cuda.current_stream(device)
    assert len({model, issue, arrival, update}) == 4
    assert torch.cuda.current_stream(device) == model


@needs_cuda
def test_what_is_issued_follows_the_backward_pass_of_its_tasks(device: torch.device) -> None:
    found = CudaStreams(device, 1)
    gradient = torch.zeros(_SIZE, device=device)
    _late(lambda: gradient.fill_(1))
    found.ready(0)
    with found.issuing([0]):
        seen = gradient.clone()
        seen.record_stream(torch.cuda.current_stream(device))
    torch.cuda.synchronize(device)
    assert seen.eq(1).all()


@needs_cuda
def test_issuing_does_not_wait_for_other_tasks_nor_the_host_for_anything(device: torch.device) -> None:
    found = CudaStreams(device, 2)
    found.ready(0)
    torch.cuda._sleep(_LATE * 10)
    found.ready(1)
    end = torch.cuda.Event()
    end.record()
    with found.issuing([0]):
        early = torch.cuda.Event()
        early.record()
    early.synchronize()
    assert not end.query()
    torch.cuda.synchronize(device)


@needs_cuda
def test_whoever_acquires_a_task_sees_its_update(device: torch.device) -> None:
    found = CudaStreams(device, 2)
    parameter = torch.zeros(_SIZE, device=device)
    torch.cuda.synchronize(device)
    with found.updating([0, 1], found.step_mark([])):
        _late(lambda: parameter.fill_(1))
        found.updated([0, 1])
    found.acquire([1])
    assert _seen(parameter).eq(1).all()


@needs_cuda
def test_a_task_that_was_never_updated_can_be_acquired(device: torch.device) -> None:
    CudaStreams(device, 2).acquire([0, 1])
    torch.cuda.synchronize(device)
    assert torch.cuda.current_stream(device).query()


@needs_cuda
def test_acquire_all_covers_what_arrived_without_an_update(device: torch.device) -> None:
    found, gradient = _arriving_late(device)
    found.acquire_all()
    assert _seen(gradient).eq(1).all()


@needs_cuda
def test_the_mark_of_an_arrival_is_reached_behind_it(device: torch.device) -> None:
    found, gradient = _arriving_late(device)
    mark = found.arrived()
    assert mark is not None
    assert not mark.query()
    mark.synchronize()
    assert gradient.eq(1).all()


@needs_cuda
def test_whoever_acquires_a_task_sees_its_sum_though_nothing_was_updated(device: torch.device) -> None:
    found, gradient = _arriving_late(device)
    found.landed([0], found.arrived())
    found.acquire([0])
    assert _seen(gradient).eq(1).all()


@needs_cuda
def test_an_update_follows_its_sum_and_what_was_read_before_step(device: torch.device) -> None:
    parameter = torch.zeros(_SIZE, device=device)
    found, gradient = _arriving_late(device)
    found.landed([0], found.arrived())
    torch.cuda._sleep(_LATE * 2)
    before = parameter.clone()
    with found.updating([0], found.step_mark([])):
        parameter.sub_(gradient)
        found.updated([0])
    found.acquire([0])
    after = _seen(parameter)
    assert before.eq(0).all()
    assert after.eq(-1).all()


@needs_cuda
def test_an_arrival_waits_for_no_update(device: torch.device) -> None:
    found = CudaStreams(device, 1)
    torch.cuda._sleep(_LATE * 10)
    step_mark = found.step_mark([])
    assert step_mark is not None
    with found.updating([0], step_mark):
        found.updated([0])
    mark = found.arrived()
    assert mark is not None
    mark.synchronize()
    assert not step_mark.query()
    torch.cuda.synchronize(device)
