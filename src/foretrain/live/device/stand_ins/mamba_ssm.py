"""Mamba's scans: those of Mamba-2 in chunks, with the convolution before them, and the plain one of Mamba.

Each is one launch each way, of the time of its library's kernels together, which keep little but their inputs: the
backward pass makes states and convolution again (``kernels.toml`` has what they move).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from foretrain.live.device.custom_kernels import Like, fused
from foretrain.live.device.stand_ins import submodule
from foretrain.live.device.stand_ins.causal_conv1d import causal_conv1d_fn

__version__ = "2.3.0"

Tensor = torch.Tensor


def _given(*tensors: Tensor | None) -> tuple[Tensor, ...]:
    return tuple(one for one in tensors if one is not None)


def mamba_chunk_scan_combined(
    x: Tensor,  # (batch, length, heads, width)
    dt: Tensor,  # (batch, length, heads)
    A: Tensor,  # (heads,)
    B: Tensor,  # (batch, length, groups, state)
    C: Tensor,  # as B
    chunk_size: int,
    D: Tensor | None = None,
    z: Tensor | None = None,  # as x
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    return_varlen_states: bool = False,
) -> Any:
    """Return the scan, like ``x``, with ``return_final_states`` also the states, (batch, heads, width, state)."""
    inputs = (x, dt, A, B, C, *_given(D, z, dt_bias, initial_states))
    sizes = {"chunk": chunk_size, "heads": x.shape[2], "width": x.shape[3], "groups": B.shape[2], "state": B.shape[3]}
    if not return_final_states:
        return fused("mamba_ssm::chunk_scan", inputs, Like(x), **sizes)
    states = Like(x, (x.shape[0], *x.shape[2:], B.shape[3]), torch.float32)
    return fused("mamba_ssm::chunk_scan", inputs, Like(x), states, **sizes)


def mamba_split_conv1d_scan_combined(
    zxbcdt: Tensor,  # (batch, length, 2 * heads * width + 2 * groups * state + heads)
    conv1d_weight: Tensor,  # (heads * width + 2 * groups * state, positions)
    conv1d_bias: Tensor | None,
    dt_bias: Tensor,
    A: Tensor,  # (heads,)
    D: Tensor,  # (heads,) or (heads, width)
    chunk_size: int,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    activation: str = "silu",
    rmsnorm_weight: Tensor | None = None,
    rmsnorm_eps: float = 1e-6,
    outproj_weight: Tensor | None = None,
    outproj_bias: Tensor | None = None,
    headdim: int | None = None,
    ngroups: int = 1,
    norm_before_gate: bool = True,
) -> Any:
    """Return the convolution, scan, gate, and where weights are given norm and product: (batch, length, out)."""
    heads = A.shape[0]
    width = headdim or D.shape[-1]
    inner = heads * width
    state = (conv1d_weight.shape[0] - inner) // (2 * ngroups)
    inputs = (zxbcdt, conv1d_weight, *_given(conv1d_bias), dt_bias, A, D, *_given(initial_states))
    sizes = {"chunk": chunk_size, "heads": heads, "width": width, "groups": ngroups, "state": state}
    wanted = [Like(zxbcdt, (*zxbcdt.shape[:2], inner))]
    if return_final_states:
        wanted.append(Like(zxbcdt, (zxbcdt.shape[0], heads, width, state), torch.float32))
    found = fused("mamba_ssm::split_conv1d_scan", inputs, *wanted, **sizes)
    out, *states = found if return_final_states else (found,)
    if rmsnorm_weight is not None:
        out = rmsnorm_fn(out, rmsnorm_weight, None)
    if outproj_weight is not None:
        out = functional.linear(out, outproj_weight, outproj_bias)
    return (out, *states) if states else out


def selective_scan_fn(
    u: Tensor,  # (batch, channels, length)
    delta: Tensor,  # as u
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
) -> Any:
    """Return the scan, with ``return_last_state`` also the last states, (batch, channels, state)."""
    inputs = (u, delta, A, B, C, *_given(D, z, delta_bias))
    if not return_last_state:
        return fused("mamba_ssm::selective_scan", inputs, Like(u))
    return fused("mamba_ssm::selective_scan", inputs, Like(u), Like(u, (*u.shape[:2], A.shape[1]), torch.float32))


def selective_scan_ref(
    u: Tensor,  # (batch, channels, length)
    delta: Tensor,  # as u
    A: Tensor,  # (channels, state)
    B: Tensor,  # (batch, state, length) or (batch, groups, state, length)
    C: Tensor,  # as B
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
) -> Any:
    """Return what `selective_scan_fn` does, by PyTorch's operators, position by position, as the library has it."""
    delta = delta.float() if delta_bias is None else delta.float() + delta_bias[:, None].float()
    delta = functional.softplus(delta) if delta_softplus else delta
    channels, state = A.shape
    grouped = (one.float().view(len(one), -1, *one.shape[-2:]) for one in (B, C))
    into, out_of = (one.repeat_interleave(channels // one.shape[1], 1) for one in grouped)
    decay = torch.exp(torch.einsum("bdl,dn->bdln", delta, A))
    added = torch.einsum("bdl,bdnl,bdl->bdln", delta, into, u.float())
    last, outs = A.new_zeros((u.shape[0], channels, state)), []
    for position in range(u.shape[2]):
        last = decay[:, :, position] * last + added[:, :, position]
        outs.append(torch.einsum("bdn,bdn->bd", last, out_of[..., position]))
    out = torch.stack(outs, 2)
    out = out if D is None else out + u * D[:, None]
    out = (out if z is None else out * functional.silu(z)).to(u.dtype)
    return (out, last) if return_last_state else out


def mamba_inner_fn(
    xz: Tensor,  # (batch, 2 * channels, length)
    conv1d_weight: Tensor,  # (channels, 1, positions)
    conv1d_bias: Tensor | None,
    x_proj_weight: Tensor,  # (rank + 2 * state, channels)
    delta_proj_weight: Tensor,  # (channels, rank)
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    A: Tensor,  # (channels, state)
    B: Tensor | None = None,
    C: Tensor | None = None,
    D: Tensor | None = None,
    delta_bias: Tensor | None = None,
    B_proj_bias: Tensor | None = None,
    C_proj_bias: Tensor | None = None,
    delta_softplus: bool = True,
    **_: Any,
) -> Tensor:
    """Return a layer of Mamba between its first product and its last, which is in it: (batch, length, out)."""
    state, rank = A.shape[1], delta_proj_weight.shape[1]
    x, z = xz.chunk(2, 1)
    x = causal_conv1d_fn(x, conv1d_weight[:, 0], conv1d_bias, activation="silu")
    ranks, keys, queries = functional.linear(x.mT, x_proj_weight).split((rank, state, state), -1)
    delta = (ranks @ delta_proj_weight.t()).mT
    into = (keys if B_proj_bias is None else keys + B_proj_bias).mT.contiguous() if B is None else B
    out_of = (queries if C_proj_bias is None else queries + C_proj_bias).mT.contiguous() if C is None else C
    y = selective_scan_fn(x, delta, A, into, out_of, D, z, delta_bias, delta_softplus)
    return functional.linear(y.mT, out_proj_weight, out_proj_bias)


def selective_state_update(state: Tensor, x: Tensor, *tensors: Tensor | None, **named: Any) -> Tensor:
    """Return the scan of one position, and take it into ``state``."""
    others = _given(*tensors, *(one for one in named.values() if isinstance(one, Tensor)))
    return fused("mamba_ssm::state_update", (state, x, *others), Like(x))


def rmsnorm_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    z: Tensor | None = None,
    eps: float = 1e-6,
    group_size: int | None = None,
    norm_before_gate: bool = True,
    **_: Any,
) -> Tensor:
    """Return the norm, gated by ``z`` where it is given."""
    return fused("mamba_ssm::rmsnorm", (x, weight, *_given(bias, z)), Like(x))


class RMSNorm(nn.Module):
    """A norm with a gate, over groups of ``group_size`` numbers."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        group_size: int | None = None,
        norm_before_gate: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.eps, self.group_size, self.norm_before_gate = eps, group_size, norm_before_gate
        self.weight = nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", None)

    def forward(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        """Return the norm of ``x``, gated by ``z``."""
        return rmsnorm_fn(x, self.weight, None, z)


submodule(f"{__name__}.ops.triton.ssd_combined", mamba_chunk_scan_combined, mamba_split_conv1d_scan_combined)
submodule(f"{__name__}.ops.triton.layernorm_gated", RMSNorm, rmsnorm_fn)
submodule(f"{__name__}.ops.triton.selective_state_update", selective_state_update)
submodule(f"{__name__}.ops.selective_scan_interface", mamba_inner_fn, selective_scan_fn, selective_scan_ref)
