import sys
from pathlib import Path

import pytest

from foretrain.live.device.fork_server import _torch_imports, preload
from foretrain.live.device.settings import RankSettings


def test_modules_of_pytorch_that_a_script_names() -> None:
    source = """
import os, torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from .torch.near import x
def main():
    from torch.utils import data
    import torchvision
"""
    assert set(_torch_imports(source)) == {"torch.nn.functional", "torch.distributed.fsdp", "torch.utils"}
    assert list(_torch_imports("not python at all")) == []


@pytest.mark.parametrize("text", ["import torch.no_such_module, torch.utils.dlpack", "\0", "import ("])
def test_what_goes_wrong_is_left_to_the_script(text: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(text)
    for name in ("train.py", "absent.py"):
        preload(RankSettings((str(tmp_path / name),), "H100", 1, 1, "/store"))
    assert "torch.no_such_module" not in sys.modules
