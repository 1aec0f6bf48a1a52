"""torchvision's operators on simulated GPUs, beside a PyTorch for which its extension is not built."""

from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.live.command import simulate

NMS = "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
SCRIPT = """
import multiprocessing
import torch, torchvision

def has_operators():
    return torchvision.extension._has_ops()

def main():
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print("there", pool.apply(has_operators))
    boxes, scores = (torch.rand(*shape, device="cuda") for shape in ((5000, 4), (5000,)))
    print("kept", *torch.ops.torchvision.nms(boxes, scores, 0.5).shape)
    try:
        torch.ops.torchvision.nms(boxes.cpu(), scores.cpu(), 0.5)
    except NotImplementedError as error:
        print(error)
    features = torch.rand(2, 8, 50, 50, device="cuda", requires_grad=True)
    if hasattr(torch.ops.torchvision, "roi_align"):
        rois = torch.rand(9, 5, device="cuda")
        print("pooled", *torch.ops.torchvision.roi_align(features, rois, 1.0, 7, 7, 2, True).shape)
    features.sum().backward()
    torch.optim.SGD([features]).step()

assert has_operators()
if __name__ == "__main__":
    main()
"""
SHAPES = """
import torch
from . import extension
torch.library.register_fake("torchvision::nms")(lambda dets, scores, iou_threshold: 1 / 0)
if hasattr(torch.ops.torchvision, "roi_align"):
    @torch.library.register_fake("torchvision::roi_align")
    def _(input, rois, scale, height, width, *_):
        return input.new_empty(len(rois), input.shape[1], height, width)
"""


@pytest.mark.parametrize("loads", [False, True])
def test_boxes_are_suppressed_and_pooled_whether_or_not_the_extension_loads(loads: bool, tmp_path: Path) -> None:
    package = tmp_path / "torchvision"
    package.mkdir()
    defined = f"import torch\nlibrary = torch.library.Library('torchvision', 'DEF')\nlibrary.define('{NMS}')\n"
    (package / "extension.py").write_text(f"{defined if loads else ''}def _has_ops(): return {loads}\n")
    (package / "__init__.py").write_text(SHAPES)
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    out = simulate("H100", script).out
    assert "kept 5000" in out
    assert "there True" in out  # in a process that the script spawns
    assert loads or "torchvision::nms on the host needs torchvision's extension" in out
    assert loads or "pooled 9 8 7 7" in out
