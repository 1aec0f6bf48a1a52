"""Simulated rank: activates the device, runs the script, notes steps and memory."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from types import ModuleType
from typing import TypeAlias

import torch
from torch.distributed import DistBackendError
from torch.utils import _foreach_utils

from foretrain.device import Device, kernel_costs
from foretrain.device.kernel_costs import KernelCosts
from foretrain.launch.launchers import told_sizes
from foretrain.live.device import (
    checkpoints,
    child_processes,
    clocks,
    commands,
    compiler,
    cuda,
    custom_kernels,
    hub_kernels,
    mpi,
    nvidia_smi,
    nvml,
    nvrtc_kernels,
    operator_cost,
    operators,
    preload,
    process_groups,
    put,
    refused_launchers,
    represented,
    script,
    shape_functions,
    stand_ins,
    tensor_types,
    torchvision_operators,
    triton_kernels,
)
from foretrain.live.device.expert_loads import Routers
from foretrain.live.device.operator_cost import HostOptimizerStep
from foretrain.live.device.settings import RankSettings
from foretrain.live.device.steps import Steps
from foretrain.live.event_log import NO_CODE, NO_FILE, STAND_IN
from foretrain.torch_version import replace_cuda_kernels

_MOST_READS = 20_000
"""Reads of values that are not real, at one line, after which the script is taken to wait for one of them."""
_STEPS_READ = 1_000
"""Steps of a script without --steps that read such a value before it is warned that it may never end."""
_FLOATING = ("Float", "Half", "Double")
"""Parts of the names of floating dtypes, e.g. of BFloat16 and Float8_e4m3fn."""

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
    _kept.append(shape_functions.install())
    _kept.append(replace_cuda_kernels(torch))
    operators.install_flex(device.has_values)
    _kept.append(custom_kernels.install())
    torchvision_operators.install()
    triton_kernels.install()
    nvrtc_kernels.install()
    tensor_types.install()
    represented.install_checkpoints(settings.folded)
    checkpoints.install(device)
    operator_cost.share(gpu)


def prepare_run(settings: RankSettings) -> None:
    """Prepare a simulation in an activated process, before its ranks are forked."""
    _run_settings[:] = [settings]
    _install_commands(settings.measured()[0], settings)


def run(device: ModuleType, settings: RankSettings, rank: int, socket: int) -> int:
    """Run the script as ``rank``, with the executor at the other end of ``socket``; return the exit status.

    Raises:
        SimulationEnded: the executor has ended the simulation.
    """
    os.environ.update(settings.environment(rank))
    os.environ.update(told_sizes(os.environ))
    commands.on_path(_commands(settings), os.environ)
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
        child_processes.install_deepspeed_launcher(settings)
        custom_kernels.install_extensions(costs, warn)
    child_processes.install_data_loader(warn)
    mpi.install(partial(process_groups.shared_store, settings.store, settings.folded))
    process_groups.expect(settings.world, rank, partial(_become, device) if settings.movable else None)
    child_processes.install_child_guard(_commands(settings))
    child_processes.install_launcher_guard(warn)
    compiler.set_charge(prices.fused)
    nvml.install()
    stand_ins.install(settings.stand_ins, partial(_tell_stand_in, device, settings))
    if "flash_attn" in settings.stand_ins:
        hub_kernels.install(partial(_tell_stand_in, device, settings))
    # What is measured is charged already.
    host = None if settings.measured_host else HostOptimizerStep(device.spend, warn)
    routers = None
    if settings.experts is not None:
        before = settings.routers_before[rank] if settings.routers_before else 0
        routers = Routers(device, settings.experts, before)
        routers.install()
    Steps(device, prices, settings.steps, watchdog.step, host, routers)
    with _scheduled(device, settings):
        status, failure = script.run(settings, rank)
    if settings.folded and (hidden := process_groups.hidden_siblings(settings.world)):
        warn(hidden)
    if refused_launchers.any_refused(_commands(settings)):
        warn("a process that the script started was refused, see its error: its work is not in the forecast")
    if routers is not None and not routers.found:
        warn("the loads of --experts changed nothing: no counted choices of a router's topk or argmax were seen")
    if settings.operators is not None:
        prices.write(f"{settings.operators}{rank}")
    if isinstance(failure, FileNotFoundError) and failure.filename:
        device.note(NO_FILE, 0, 0, str(failure.filename).encode(errors="backslashreplace"))
    elif isinstance(failure, ImportError | SyntaxError):
        device.note(NO_CODE, 0, 0, b"")
    _note_memory(device, _out_of_memory(failure), warn)
    try:
        device.leave(status)
    except DistBackendError:
        raise script.SimulationEnded from None
    return status


def _commands(settings: RankSettings) -> str:
    """Return the folder of commands that stand in for those of machines with GPUs."""
    return f"{settings.store}.bin"


def _install_commands(gpu: Device, settings: RankSettings) -> None:
    folder = _commands(settings)
    os.mkdir(folder)
    refused_launchers.install(folder)
    capability = ".".join(map(str, gpu.capability))
    about = gpu.product, gpu.memory >> 20, settings.reserve >> 20, capability, cuda.CUDA
    count = min(settings.gpus, settings.world)
    nvidia_smi.install(folder, [nvidia_smi.ServerGpu(index, *about) for index in range(count)])


def _become(device: ModuleType, rank: int) -> None:
    """End this process, so that one that is ``rank`` takes its place."""
    device.note(device.RANK, rank, 0, b"")
    device.synchronize(-1)  # until the executor has read it
    raise script.Replaced


def _tell_stand_in(device: ModuleType, settings: RankSettings, library: str) -> None:
    """Tell at once, and once for all ranks, that the script has imported what only stands for a library."""
    device.note(STAND_IN, 0, 0, library.encode())
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
