"""Apex: fused norms, optimizers, lists of tensors, data parallelism; each takes the time of what PyTorch has of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from foretrain.live.device import change_after_import
from foretrain.live.device.custom_kernels import launch
from foretrain.live.device.stand_ins import submodule


class FusedAdam(torch.optim.Adam):
    """Adam, or AdamW."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
        **_: Any,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, fused=True, decoupled_weight_decay=adam_w_mode)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take what is loaded; the library counts steps for each group, not for each parameter."""
        for group in state["param_groups"]:
            for parameter in group["params"]:
                if held := state["state"].get(parameter):
                    held.setdefault("step", float(group.get("step", 0)))
        super().__setstate__(state)


class FusedSGD(torch.optim.SGD):
    """SGD with momentum."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        **_: Any,
    ) -> None:
        super().__init__(params, lr, momentum, dampening, weight_decay, nesterov, fused=True)


class FusedLAMB(torch.optim.Optimizer):
    """LAMB: two kernels for all parameters of a group, and norms of their gradients, values and updates."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        **_: Any,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters; the update takes the gradient's place in memory."""
        loss = None if closure is None else closure()
        for group in self.param_groups:
            parameters = [one for one in group["params"] if one.grad is not None]
            if not parameters:
                continue
            for one in parameters:
                if not self.state[one]:
                    self.state[one].update(exp_avg=torch.zeros_like(one), exp_avg_sq=torch.zeros_like(one))
            gradients = [one.grad for one in parameters]
            moments = [self.state[one][name] for one in parameters for name in ("exp_avg", "exp_avg_sq")]
            torch.ops.aten._foreach_norm(gradients)
            _launch("apex::multi_tensor_lamb_stage1", [*gradients, *moments], parameters)
            torch.ops.aten._foreach_norm([*parameters, *gradients])
            _launch("apex::multi_tensor_lamb_stage2", parameters, gradients)
        return loss


def _launch(name: str, updated: Sequence[torch.Tensor], read: Sequence[torch.Tensor]) -> None:
    """Launch a kernel that reads all, and writes ``updated``."""
    arguments = {f"tensor{place}": tensor for place, tensor in enumerate((*updated, *read))}
    launch(name, arguments, arguments, list(arguments)[: len(updated)])


class FusedLayerNorm(torch.nn.LayerNorm):
    """Layer norm."""

    def __init__(
        self, normalized_shape: Any, eps: float = 1e-5, elementwise_affine: bool = True, memory_efficient: bool = False
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine)


class FusedRMSNorm(torch.nn.RMSNorm):
    """RMS norm."""

    def __init__(
        self, normalized_shape: Any, eps: float = 1e-5, elementwise_affine: bool = True, memory_efficient: bool = False
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine)


def _affine_layer_norm(
    ctx: Any, input: Any, weight: Any, bias: Any, normalized_shape: Any, eps: float, memory_efficient: bool = False
) -> torch.Tensor:
    return torch.nn.functional.layer_norm(input, tuple(normalized_shape), weight, bias, eps)


def _fast_layer_norm(
    ctx: Any, x: Any, gamma: Any, beta: Any, epsilon: float = 1e-5, memory_efficient: bool = False
) -> torch.Tensor:
    return torch.nn.functional.layer_norm(x, gamma.shape, gamma, beta, epsilon)


def _called_by_apply(forward: Callable[..., torch.Tensor]) -> SimpleNamespace:
    """Return what is called as an autograd function is, and whose arguments can be asked for."""
    return SimpleNamespace(forward=forward, apply=lambda *args: forward(None, *args))


class MultiTensorApply:
    """Calls a function of ``amp_C``, which is one launch for lists of tensors."""

    available = True

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size

    def __call__(self, op: Callable[..., Any], noop_flag_buffer: Any, tensor_lists: Any, *args: Any) -> Any:
        """Return what the function returns."""
        return op(self.chunk_size, noop_flag_buffer, tensor_lists, *args)


class DistributedDataParallel(torch.nn.parallel.DistributedDataParallel):
    """DistributedDataParallel of this process's GPU."""

    def __init__(self, module: torch.nn.Module, **_: Any) -> None:
        super().__init__(module, device_ids=[torch.cuda.current_device()])


submodule(f"{__name__}.optimizers", FusedAdam, FusedLAMB, FusedSGD)
submodule(
    f"{__name__}.normalization",
    FusedLayerNorm,
    FusedRMSNorm,
    MixedFusedLayerNorm=FusedLayerNorm,
    MixedFusedRMSNorm=FusedRMSNorm,
)
submodule(
    f"{__name__}.normalization.fused_layer_norm",
    FusedLayerNorm,
    FusedRMSNorm,
    FusedLayerNormAffineFunction=_called_by_apply(_affine_layer_norm),
)
submodule(f"{__name__}.contrib.layer_norm.layer_norm", FastLayerNormFN=_called_by_apply(_fast_layer_norm))
submodule(f"{__name__}.multi_tensor_apply", MultiTensorApply, multi_tensor_applier=MultiTensorApply(2048 * 32))
submodule(
    f"{__name__}.parallel",
    DistributedDataParallel,
    torch.nn.SyncBatchNorm,
    convert_syncbn_model=torch.nn.SyncBatchNorm.convert_sync_batchnorm,
)
# DeepSpeed takes Apex's optimizers for ZeRO where it finds them; as an installed package it does not find these.
change_after_import({"deepspeed.runtime.zero.utils": lambda module: module.ZERO_SUPPORTED_OPTIMIZERS.append(FusedAdam)})
