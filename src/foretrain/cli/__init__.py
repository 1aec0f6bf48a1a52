"""The commands. Each imports what it needs when it runs, so that ``foretrain --help`` answers at once."""

try:
    from foretrain.cli.main import main
except KeyboardInterrupt:  # before a command runs, most of the time goes into this import
    from foretrain.cli.progress import end_interrupted

    end_interrupted()

__all__ = ["main"]
