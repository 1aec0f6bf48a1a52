"""What a script will import of PyTorch, so that ranks can share it: FSDP and pipelining take half a second each."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from foretrain.live.device.settings import RankSettings

_ALWAYS = ("torch._dynamo", "torch._dynamo.trace_rules")
"""What the first optimizer of a script imports, and DistributedDataParallel: a second, and 50 MiB in every rank."""


def preload(settings: RankSettings) -> None:
    """Imports the modules of PyTorch that the script names; what goes wrong is left to the script to meet."""
    for name in dict.fromkeys([*_ALWAYS, *_torch_imports(_script_source(settings))]):
        with suppress(Exception):
            importlib.import_module(name)


def _script_source(settings: RankSettings) -> str:
    """Of a script; not of a module, whose package would have to run to find it."""
    try:
        return "" if settings.module else Path(settings.script[0]).read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""


def _torch_imports(source: str) -> Iterator[str]:
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module]
        yield from (name for name in names if name.startswith("torch."))
