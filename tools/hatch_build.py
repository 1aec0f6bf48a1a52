"""A step of building the wheel: adds the compiled extensions that ``tools/wheel.py`` names, if any."""

from __future__ import annotations

import os
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class Prebuilt(BuildHookInterface[Any]):
    """Puts what is in the folder ``FORETRAIN_PREBUILT`` into the wheel, which is then for this platform alone."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the folder to what is built."""
        del version
        if folder := os.environ.get("FORETRAIN_PREBUILT"):
            build_data["force_include"][f"{folder}/device"] = "foretrain/live/device/prebuilt"
            build_data["force_include"][f"{folder}/kernels"] = "foretrain/network/prebuilt"
            build_data["force_include"][f"{folder}/ring.so"] = "foretrain/comm/collectives/libring.so"
            build_data["pure_python"] = False
            build_data["tag"] = "py3-none-linux_x86_64"
