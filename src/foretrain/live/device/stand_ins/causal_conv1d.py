"""Causal convolutions of few positions along sequences, as Mamba's layers have them: one kernel each way."""

from __future__ import annotations

from typing import Any

import torch

from foretrain.live.device.custom_kernels import Like, fused, launch
from foretrain.live.device.stand_ins import submodule

__version__ = "1.6.0"

Tensor = torch.Tensor


def causal_conv1d_fn(
    x: Tensor,  # (batch, channels, length)
    weight: Tensor,  # (channels, positions)
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: Tensor | None = None,
    activation: str | None = None,
) -> Any:
    """Return the convolution, with ``return_final_states`` also the last ``positions - 1`` of each channel."""
    inputs = tuple(one for one in (x, weight, bias, initial_states) if one is not None)
    if not return_final_states:
        return fused("causal_conv1d::conv", inputs, Like(x))
    states = Like(x, (*x.shape[:2], weight.shape[1] - 1))
    return fused("causal_conv1d::conv", inputs, Like(x), states)


def causal_conv1d_update(x: Tensor, conv_state: Tensor, weight: Tensor, *_: Any, **__: Any) -> Tensor:
    """Return the convolution of one position, and take it into ``conv_state``."""
    return fused("causal_conv1d::update", (x, conv_state, weight), Like(x))


def causal_conv1d_fwd_function(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    seq_idx: Tensor | None,
    initial_states: Tensor | None,
    final_states_out: Tensor | None,
    silu_activation: bool,
) -> Tensor:
    """Return the convolution, without a gradient."""
    out = torch.empty_like(x)
    read = {"x": x, "weight": weight, "bias": bias, "initial_states": initial_states}
    launch("causal_conv1d::conv", read, read, (), (out,))
    return out


def causal_conv1d_bwd_function(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    dout: Tensor,
    seq_idx: Tensor | None,
    initial_states: Tensor | None,
    dfinal_states: Tensor | None,
    dx: Tensor | None,
    return_dinitial_states: bool,
    silu_activation: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return the gradients, that of ``x`` in ``dx`` where it is given."""
    dx = torch.empty_like(x) if dx is None else dx
    read = {"x": x, "weight": weight, "bias": bias, "dout": dout}
    launch("causal_conv1d::conv_backward", read, read, (), (dx,))
    states = torch.empty_like(initial_states) if return_dinitial_states and initial_states is not None else None
    return dx, torch.empty_like(weight), None if bias is None else torch.empty_like(bias), states


_CONVOLUTIONS = causal_conv1d_fn, causal_conv1d_update
submodule(f"{__name__}.causal_conv1d_interface", *_CONVOLUTIONS)
submodule(
    f"{__name__}.cpp_functions",
    causal_conv1d_fwd_function,
    causal_conv1d_bwd_function,
    causal_conv1d_update_function=causal_conv1d_update,
)
