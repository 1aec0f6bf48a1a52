"""Operators of torchvision: declared where its extension does not load, and non-maximum suppression on the GPU.

PyPI's torchvision is built for PyTorch's CUDA build, and its extension does not load beside another. Shapes,
derivatives and dtypes under autocast torchvision registers from Python, for operators that are there. So simulated GPUs
need no more than their signatures. They do not compute on the host.

How many boxes non-maximum suppression keeps depends on their values, so torchvision has no shape for it. As everywhere,
a mask without values selects everything.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, Final

import torch

from foretrain.live.device import change_after_import, put
from foretrain.live.device.custom_kernels import launch

Tensor = torch.Tensor

_POOLING = "Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width"
_INPUT = "SymInt batch_size, SymInt channels, SymInt height, SymInt width"
_CONVOLUTION = (
    "Tensor input, Tensor weight, Tensor offset, Tensor mask, Tensor bias, SymInt stride_h, SymInt stride_w, SymInt"
    " pad_h, SymInt pad_w, SymInt dilation_h, SymInt dilation_w, SymInt groups, SymInt offset_groups, bool use_mask"
)
_GRADIENTS = "(Tensor, Tensor, Tensor, Tensor, Tensor)"
_MAPPED = _POOLING.replace("rois,", "rois, Tensor channel_mapping,")
_SIGNATURES: Final = {
    "nms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "roi_align": f"(Tensor input, {_POOLING}, int sampling_ratio, bool aligned) -> Tensor",
    "_roi_align_backward": f"(Tensor grad, {_POOLING}, {_INPUT}, int sampling_ratio, bool aligned) -> Tensor",
    "qroi_align": "(Tensor input, Tensor rois, float input_scale, int input_zero_point, float rois_scale, int"
    " rois_zero_point, float spatial_scale, SymInt pooled_height, SymInt pooled_width, int sampling_ratio, bool"
    " aligned) -> Tensor",
    "roi_pool": f"(Tensor input, {_POOLING}) -> (Tensor, Tensor)",
    "_roi_pool_backward": f"(Tensor grad, {_POOLING.replace('rois,', 'rois, Tensor argmax,')}, {_INPUT}) -> Tensor",
    "ps_roi_align": f"(Tensor input, {_POOLING}, int sampling_ratio) -> (Tensor, Tensor)",
    "_ps_roi_align_backward": f"(Tensor grad, {_MAPPED}, int sampling_ratio, {_INPUT}) -> Tensor",
    "ps_roi_pool": f"(Tensor input, {_POOLING}) -> (Tensor, Tensor)",
    "_ps_roi_pool_backward": f"(Tensor grad, {_MAPPED}, {_INPUT}) -> Tensor",
    "deform_conv2d": f"({_CONVOLUTION}) -> Tensor",
    "_deform_conv2d_backward": f"(Tensor grad, {_CONVOLUTION}) -> {_GRADIENTS}",
    "box_iou_rotated": "(Tensor boxes1, Tensor boxes2) -> Tensor",
}


def install() -> None:
    """Give torchvision its operators once its extension has been looked for."""

    def change(module: ModuleType) -> None:
        library = torch.library.Library("torchvision", "FRAGMENT")
        if not module._has_ops():
            for name, signature in _SIGNATURES.items():
                library.define(name + signature)
                library.impl(name, _refusal(name), "CPU")
            library.define("_cuda_version() -> int")
            library.impl("_cuda_version", lambda: -1, "CompositeExplicitAutograd")
            put(module, _has_ops=lambda: True)
        library.impl("nms", _suppressed, "CUDA")
        put(module, _library=library)  # what is registered lives as long as it does

    change_after_import({"torchvision.extension": change})


def _refusal(name: str) -> Any:
    def refuse(*_: Any) -> Any:
        raise NotImplementedError(
            f"torchvision::{name} on the host needs torchvision's extension, which does not load here: torchvision is"
            " built for another PyTorch; install both from one index, e.g. pip install torch torchvision --index-url"
            " https://download.pytorch.org/whl/cpu"
        )

    return refuse


def _suppressed(dets: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
    """Return the boxes that are kept, by falling score."""
    order = scores.argsort(stable=True, descending=True)
    kept = torch.empty_like(order, dtype=torch.bool)
    launch("torchvision::nms", {"dets": dets, "kept": kept}, read={"dets"}, written={"kept"})
    return order.masked_select(kept)
