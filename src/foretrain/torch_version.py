"""The one place that says which PyTorch foretrain works with."""

from __future__ import annotations

from foretrain.errors import ForetrainError, MissingExtra

SUPPORTED = "2.13"
"""The minor release whose hooks the tests of this package have seen."""


def require_torch(purpose: str = "recording") -> None:
    """Import torch, or say what is missing for ``purpose``.

    Raises:
        MissingExtra: torch is not installed.
        ForetrainError: another minor release is. When hooks fire, and how often, changes between minor releases, and
            a wrong recording looks like a right one.
    """
    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise MissingExtra("torch", "torch", purpose) from None
    if not f"{torch.__version__}.".startswith(f"{SUPPORTED}."):
        raise ForetrainError(
            f"{purpose} needs torch {SUPPORTED}.*, and {torch.__version__} is installed; "
            f"install it with: pip install 'torch=={SUPPORTED}.*'"
        )
