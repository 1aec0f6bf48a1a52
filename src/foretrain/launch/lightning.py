"""Lightning: a strategy that trains with DistributedDataParallel under foretrain's schedule.

trainer = lightning.Trainer(strategy=ft.lightning.Scheduled("auto"), devices=8, num_nodes=4)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.optim import LBFGS, Optimizer

from foretrain.comm.options import Compression, Timeouts, Transport, TransportKind
from foretrain.launch import LaunchSettings
from foretrain.launch.ddp_patch import DdpPatch


class Scheduled(DDPStrategy):
    """Lightning's DDPStrategy, whose model's gradients are exchanged by a schedule of foretrain while it is fitted.

    Clipping, accumulation, precision plugins, callbacks and checkpoints work as with DDPStrategy. What a schedule
    cannot do is done by PyTorch's own reducer, and a line on stderr says so; see `foretrain.launch.scheduled_ddp`.

    Args:
        schedule: a policy, ``"auto"``, or a plan file's path, as of `foretrain.plugins.torch.api.attach`.
        transport, compression, timeouts, tune: as of `attach`.
        options: of DDPStrategy.

    Raises:
        ConfigError: an argument is wrong.
    """

    def __init__(
        self,
        schedule: str = "auto",
        *,
        transport: Transport | TransportKind = "all_reduce",
        compression: Compression | None = None,
        timeouts: Timeouts | None = None,
        tune: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self._settings = LaunchSettings.of(schedule, transport, compression, timeouts, tune)
        self._patch: DdpPatch | None = None

    def setup(self, trainer: Trainer) -> None:
        """Wrap the model and make its optimizers, under foretrain's DistributedDataParallel."""
        if trainer.state.fn == TrainerFn.FITTING:
            self._patch = DdpPatch(self._settings).__enter__()
        super().setup(trainer)

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run the closure, then the optimizer: a step that is given a closure could not be deferred."""
        precision, module = self.precision_plugin, model or self.lightning_module
        # With a scaler, Lightning does so itself. LBFGS runs its closure several times.
        scaled = getattr(precision, "scaler", None) is not None or not isinstance(precision, Precision)
        other = scaled or self._model_averager is not None or isinstance(optimizer, LBFGS)
        if other or not isinstance(module, LightningModule):
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        result = precision._wrap_closure(module, optimizer, closure)
        optimizer.step(**kwargs)
        return result

    def on_exception(self, exception: BaseException) -> None:
        """Give up the schedule without waiting for other ranks."""
        self._leave(exception)
        super().on_exception(exception)

    def teardown(self) -> None:
        """Wait for what is under way, and restore PyTorch."""
        self._leave(None)
        super().teardown()

    def _leave(self, error: BaseException | None) -> None:
        patch, self._patch = self._patch, None
        if patch is not None:
            patch.__exit__(type(error) if error else None, error, error.__traceback__ if error else None)
