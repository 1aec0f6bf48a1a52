"""The commands. Each imports what it needs when it runs, so that ``foretrain --help`` answers at once."""

from foretrain.cli.main import main

__all__ = ["main"]
