"""Simulated rank: activates the device, runs the script, notes steps and memory."""

from __future__ import annotations

import itertools
import json
import math
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial, wraps
from types import ModuleType
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch.distributed import DistBackendError
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils import _foreach_utils

from foretrain.device import Device, kernel_costs
from foretrain.device.kernel_costs import KernelCosts
from foretrain.live.device import (
    checkpoints,
    child_processes,
    clocks,
    compiler,
    cuda,
    custom_kernels,
    mpi,
    nvidia_smi,
    operator_cost,
    operators,
    preload,
    process_groups,
    put,
    represented,
    script,
    stand_ins,
    streams,
    torchvision_operators,
    triton_kernels,
)
from foretrain.live.device.expert_loads import Routers
from foretrain.live.device.operator_cost import HostOptimizerStep, local_part
from foretrain.live.device.settings import RankSettings
from foretrain.torch_version import replace_cuda_kernels

_MOST_READS = 20_000
"""Reads of values that are not real, at one line, after which the script is taken to wait for one of them."""
_STEPS_READ = 1_000
"""Steps of a script without --steps that read such a value before it is warned that it may never end."""
_FLOATING = ("Float", "Half", "Double")
"""Parts of the names of floating dtypes, e.g. of BFloat16 and Float8_e4m3fn."""

_NONE = 0
"""In the place of the id of an optimizer, where a script has none, or of a parameter."""
_TRIALS = 2
"""Backward passes that a script may make before its first optimizer, and that are no steps."""

Place: TypeAlias = tuple[str, int]
"""A file and its line."""

_kept: list[object] = []
"""Objects that must live as long as the process."""


_run_settings: list[RankSettings] = []
"""Of the simulation that this process belongs to, which may begin after the device is activated."""


def activate(device: ModuleType, settings: RankSettings) -> None:
    """Make PyTorch use the simulated device; once per process, before it forks.

    Depends on those of ``settings`` alone that `RankSettings.of_device` keeps.
    """
    gpu, _ = settings.measured()
    own = set(device.native_operators())
    device.install([name for name in operators.cuda_operators() if name not in own], *operators.checked_operators())
    device.set_device_count(min(settings.gpus, settings.world))
    device.set_capability(*gpu.capability)
    device.set_capacity(gpu.memory, settings.reserve)
    device.set_launch(0 if gpu.serial else settings.launch)
    cuda.install(device, cuda.properties_of(gpu))
    if gpu.serial:
        _use_cpu_optimizers()
    process_groups.install(device, lambda: process_groups.shared_store(_run_settings[0].store, settings.folded))
    if settings.folded:
        process_groups.install_stores()
        represented.install(device, settings.world)
    compiler.install(device)
    _kept.append(operators.install_shapes())
    _kept.append(replace_cuda_kernels(torch))
    operators.install_flex(device.has_values)
    _kept.append(custom_kernels.install())
    torchvision_operators.install()
    triton_kernels.install()
    represented.install_checkpoints(settings.folded)
    checkpoints.install(device)
    operator_cost.share(gpu)


def prepare_run(settings: RankSettings) -> None:
    """Prepare a simulation in an activated process, before its ranks are forked."""
    _run_settings[:] = [settings]
    _install_nvidia_smi(settings.measured()[0], settings)


def run(device: ModuleType, settings: RankSettings, rank: int, socket: int) -> int:
    """Run the script as ``rank``, with the executor at the other end of ``socket``; return the exit status.

    Raises:
        SimulationEnded: the executor has ended the simulation.
    """
    os.environ.update(settings.environment(rank))
    nvidia_smi.on_path(_commands(settings), os.environ)
    os.register_at_fork(after_in_child=lambda: _leave_log(device, socket))
    torch.set_num_threads(1)
    gpu, measured = settings.measured()
    costs = KernelCosts() if settings.costs is None else kernel_costs.load(settings.costs)
    prices = operator_cost.Prices(
        gpu, settings.factor, measured, costs=costs, remembering=settings.operators is not None,
        slowdown=dict(settings.slow).get(rank, 1.0),
    )  # fmt: skip
    device.set_price(prices)
    device.connect(socket)
    device.set_tracing(settings.tracing)
    if settings.measured_host:
        device.measure_host()
    watchdog = _Watchdog(device, settings)
    device.set_on_unreal_read(watchdog)

    def warn(text: str) -> None:
        device.note(device.WARNING, 0, 0, text.encode())

    with preload.following():
        clocks.install(device.host, device.spend)
        child_processes.install_spawn(settings, rank)
        custom_kernels.install_extensions(costs, warn)
    child_processes.install_data_loader(warn)
    mpi.install(partial(process_groups.shared_store, settings.store, settings.folded))
    process_groups.expect(settings.world, rank, partial(_become, device) if settings.movable else None)
    child_processes.install_child_guard()
    child_processes.install_launcher_guard(warn)
    compiler.set_charge(prices.fused)
    stand_ins.install(settings.stand_ins, partial(_tell_stand_in, settings))
    # What is measured is charged already.
    host = None if settings.measured_host else HostOptimizerStep(device.spend, warn)
    routers = None
    if settings.experts is not None:
        before = settings.routers_before[rank] if settings.routers_before else 0
        routers = Routers(device, settings.experts, before)
        routers.install()
    _Steps(device, prices, settings.steps, watchdog, host, routers)
    with _scheduled(device, settings):
        status, failure = script.run(settings, rank)
    if settings.folded and (hidden := process_groups.hidden_siblings(settings.world)):
        warn(hidden)
    if routers is not None and not routers.found:
        warn("the loads of --experts changed nothing: no counted choices of a router's topk or argmax were seen")
    if settings.operators is not None:
        prices.write(f"{settings.operators}{rank}")
    _note_memory(device, _out_of_memory(failure), warn)
    try:
        device.leave(status)
    except DistBackendError:
        raise script.SimulationEnded from None
    return status


def _commands(settings: RankSettings) -> str:
    """Return the folder of commands that scripts find on machines with GPUs."""
    return f"{settings.store}.bin"


def _install_nvidia_smi(gpu: Device, settings: RankSettings) -> None:
    capability = ".".join(map(str, gpu.capability))
    about = gpu.product, gpu.memory >> 20, settings.reserve >> 20, capability, cuda.CUDA
    count = min(settings.gpus, settings.world)
    nvidia_smi.install(_commands(settings), [nvidia_smi.ServerGpu(index, *about) for index in range(count)])


def _become(device: ModuleType, rank: int) -> None:
    """End this process, so that one that is ``rank`` takes its place."""
    device.note(device.RANK, rank, 0, b"")
    device.synchronize(-1)  # until the executor has read it
    raise script.Replaced


def _tell_stand_in(settings: RankSettings, library: str) -> None:
    """Tell at once, and once for all ranks, that the script has imported what only stands for a library."""
    text = f"foretrain: {library} is not installed: a stand-in launches its kernels, and computes nothing\n"
    if script.first_to_say(text, settings):
        sys.stderr.write(text)


def _use_cpu_optimizers() -> None:
    """Make optimizers go from parameter to parameter, as on CPUs; they join them in lists only on GPUs."""
    # No attribute of torch.optim leads to the second.
    for module in (_foreach_utils, sys.modules["torch.optim.optimizer"]):
        put(module, _get_foreach_kernels_supported_devices=lambda: [])


def _scheduled(device: ModuleType, settings: RankSettings) -> AbstractContextManager[object]:
    """Return a context around a script whose gradients a policy exchanges."""
    if settings.schedule is None:
        return nullcontext()
    from foretrain.live.device.simulated_ddp import SimulatedTakeover

    return SimulatedTakeover(device, settings.schedule, settings.launch)


class _Steps:
    """Notes every step of the optimizer, and ends the script after the last wanted.

    Where a script has several optimizers, the first that makes its n-th step makes the script's. An optimizer makes its
    n-th when it updates a parameter for the n-th time: DeepSpeed's ZeRO calls it for each group of parameters. While a
    script has made none, it updates parameters by hand, and each backward pass counts as a step. What is launched from
    one step to the next, and which memory is for what, is known here as well.
    """

    expects_whole_steps = False
    """False: updates may be applied parameter by parameter; see
    `foretrain.plugins.torch.deferred_optimizer.why_not_separable`."""

    def __init__(
        self,
        device: ModuleType,
        prices: operator_cost.Prices,
        wanted: int | None,
        watchdog: _Watchdog,
        host: HostOptimizerStep | None,
        routers: Routers | None,
    ) -> None:
        self._device, self._prices, self._wanted, self._watchdog = device, prices, wanted, watchdog
        self._host, self._routers = host, routers
        self._updated: dict[int, Counter[int]] = {}
        self._updating: tuple[int, ...] = ()
        # By identity: a reference would keep a state that the script has dropped in memory.
        self._states: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        self._before: dict[str, Any] = device.counts()
        self._before_update: Sequence[int] = ()
        self._updates: Counter[int] = Counter()
        self._by_hand, self._passes, self._passes_by_hand = True, 0, 0
        self.done = 0
        register_optimizer_step_pre_hook(self._steps)
        register_optimizer_step_post_hook(self._stepped)
        self._watch_backward()

    def _watch_backward(self) -> None:
        make, backward = Optimizer.__init__, torch.autograd.backward

        @wraps(make)
        def made(*arguments: Any, **named: Any) -> None:
            self._by_hand = False
            make(*arguments, **named)

        @wraps(backward)
        def passed(*arguments: Any, **named: Any) -> None:
            self._passes += 1
            try:
                backward(*arguments, **named)
            finally:
                self._passes -= 1
            if self._by_hand and not self._passes:  # reentrant checkpoints have passes within passes
                self._passed()

        put(Optimizer, __init__=made)
        put(torch.autograd, backward=passed)

    def _passed(self) -> None:
        """Count a backward pass as a step, but for the first: they may only try the model."""
        device = self._device
        self._passes_by_hand += 1
        if self._passes_by_hand <= _TRIALS:
            return
        if not self.done:
            text = "the script has no optimizer of torch.optim: each backward pass is taken for a step"
            device.note(device.WARNING, 0, 0, text.encode())
        if not device.capturing():
            self._made_one(_NONE, (_NONE,))

    def _steps(self, optimizer: Optimizer, *_: Any) -> None:
        if self.done == self._wanted:  # a bare except of the script has kept it from ending
            raise script.Enough
        device = self._device
        parameters = [tensor for group in optimizer.param_groups for tensor in group["params"]]
        gradients = [tensor.grad for tensor in parameters if tensor.grad is not None]
        self._updating = tuple(id(one) for one in parameters if one.grad is not None or not gradients) or (_NONE,)
        device.retag([local_part(tensor) for tensor in parameters], device.PARAMETER)
        device.retag([local_part(tensor) for tensor in gradients], device.GRADIENT)
        if self._states.get(optimizer) != id(optimizer.state):  # made by load_state_dict; others in step() itself
            self._states[optimizer] = id(optimizer.state)
            device.retag(list(_tensors(optimizer.state)), device.OPTIMIZER)
        device.set_tag(device.OPTIMIZER)
        self._before_update = device.counts()["by_name"]
        if self._host is not None:
            self._host.begin([local_part(tensor) for tensor in parameters if tensor.grad is not None])

    def _stepped(self, optimizer: Optimizer, *_: Any) -> None:
        device = self._device
        device.set_tag(device.ACTIVATION)
        self._updates.update(dict(enumerate(_more(device.counts()["by_name"], self._before_update))))
        if self._host is not None:
            self._host.end()
        if not device.capturing():
            self._made_one(id(optimizer), self._updating)
        elif not streams.after_replays(optimizer, partial(self._made_one, id(optimizer), self._updating)):
            text = "a CUDA graph in which an optimizer makes several steps is taken for one step"
            device.note(device.WARNING, 0, 0, text.encode())

    def _made_one(self, optimizer: int, parameters: Sequence[int]) -> None:
        """Count an update of these parameters, by their ids, by an optimizer, by its, which has been launched."""
        device = self._device
        updated = self._updated.setdefault(optimizer, Counter())
        updated.update(parameters)
        made = max(map(updated.__getitem__, parameters))
        if made <= self.done:
            return
        self.done = made
        if self._routers is not None:
            self._routers.step = made
        self._watchdog.step()
        device.note(device.STEP, made, device.record(), b"")
        device.end_memory_step()
        now = device.counts()
        device.note(device.COST, made, 0, json.dumps(self._cost(now)).encode())
        self._before = now
        self._updates.clear()
        if made == self._wanted:
            raise script.Enough

    def _cost(self, now: dict[str, Any]) -> dict[str, Any]:
        """Return the work that was launched since the step before."""
        before = self._before
        spreads = itertools.zip_longest(now["spreads"], before["spreads"], fillvalue=0.0)
        names = self._device.kernel_names()
        by_name = zip(names, _more(now["by_name"], before["by_name"]), strict=True)
        return {
            "kernels": now["kernels"] - before["kernels"],
            "flops": now["flops"] - before["flops"],
            "recomputed": now["recomputed"] - before["recomputed"],
            "times": [one - other for one, other in zip(now["times"], before["times"], strict=True)],
            "spread": round(math.hypot(*(one - other for one, other in spreads))),
            "by_name": {name: time for name, time in by_name if time},
            "updates": {names[number]: time for number, time in self._updates.items() if time},
            "unknown": self._prices.unknown,
            "unused": self._prices.unused,
        }


def _more(now: Sequence[int], before: Sequence[int]) -> Iterator[int]:
    """Yield by how much times by kernel's number have grown; new kernels have new numbers."""
    return (one - other for one, other in itertools.zip_longest(now, before, fillvalue=0))


def _tensors(state: Mapping[Any, Mapping[str, Any]]) -> Iterator[torch.Tensor]:
    """Yield this rank's part of an optimizer's state."""
    for values in state.values():
        for value in values.values():
            if isinstance(value, torch.Tensor):
                yield local_part(value)


class _Watchdog:
    """Warns of values read that are not real, and ends a loop that waits for one.

    Of a floating one, e.g. a loss to print, only if it is read in step after step of a script that --steps does not
    end: it may be the script's own end that hangs on it.
    """

    def __init__(self, device: ModuleType, settings: RankSettings) -> None:
        self._device, self._settings = device, settings
        self._warned: set[Place] = set()
        self._reads: dict[Place, int] = {}
        self._steps_read: Counter[Place] = Counter()

    def step(self) -> None:
        """Count a step: the script goes on, so it does not wait."""
        for place in self._reads if self._settings.steps is None else ():
            self._steps_read[place] += 1
            if self._steps_read[place] == _STEPS_READ:
                self._warn_of_endless_loop(place)
        self._reads.clear()

    def __call__(self, what: str) -> None:
        if script.in_batch_norm():  # it leaves out ranks without inputs, and there are none
            return
        place = script.script_line()
        count = self._reads[place] = self._reads.get(place, 0) + 1
        where = f"{place[0]}:{place[1]}"
        if place not in self._warned and not any(name in what for name in _FLOATING):
            self._warned.add(place)
            text = f"{where} reads {what}, which no GPU has computed: it is made up, and what follows from it as well"
            self._device.note(self._device.WARNING, 0, 0, text.encode())
        if count == _MOST_READS:
            raise RuntimeError(
                f"{where} has read {what} {count:,} times. Values on the simulated GPU are not real, so a loop that"
                f" waits for one of them never ends; bound it, or read a value that the host computes"
            )

    def _warn_of_endless_loop(self, place: Place) -> None:
        """Warn at once, on stderr: warnings that are shown at the end would come too late."""
        text = (
            f"foretrain: {place[0]}:{place[1]} has read a value that is not real in {_STEPS_READ:,} steps: if the"
            " script ends by such a value, e.g. by its loss, it never ends; pass --steps\n"
        )
        if script.first_to_say(text, self._settings):
            sys.stderr.write(text)


def _leave_log(device: ModuleType, socket: int) -> None:
    """Disconnect a child of the rank, e.g. a DataLoader's worker, from the log: it has no GPU and no clock."""
    device.connect(-1)
    with suppress(OSError):
        os.close(socket)


_OF_A_MODEL = 16 << 20
"""Bytes on a GPU from which it is taken to be used: less may be a tensor that was put on the wrong one."""


def _out_of_memory(error: BaseException | None) -> str | None:
    """Return the message of PyTorch's allocator, if that is why the script failed."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError):
            return str(error)
        error = error.__cause__ or error.__context__
    return None


def _note_memory(device: ModuleType, failure: str | None, warn: Callable[[str], None]) -> None:
    """Write the last note: peak memory of the rank's fullest GPU, and the allocator's error if it was too little.

    Warn of a rank with several GPUs, which no simulation has.
    """
    needs = [device.memory_needed(index) for index in range(device.device_count())]
    used = [f"cuda:{index}" for index, need in enumerate(needs) if need["allocated"] >= _OF_A_MODEL]
    if len(used) > 1:
        warn(
            f"one process computes on {' and '.join(used)}, and a simulated rank has one GPU: the arithmetic of all "
            "counts as one's, and memory is the fullest's; start a process for each GPU"
        )
    most = max(needs, key=lambda need: (need["reserved"], need["allocated"]))
    device.note(device.MEMORY, 0, 0, json.dumps(most | {"out_of_memory": failure}).encode())
