"""``foretrain``: reads the command line, runs one command, and turns errors into one plain message."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import tyro
from tyro.extras import SubcommandApp

from foretrain import __version__
from foretrain.cli import lab, topology
from foretrain.cli.bound import bound
from foretrain.cli.broken_pipe import ReaderGone
from foretrain.cli.calibrate import calibrate
from foretrain.cli.catalog import catalog
from foretrain.cli.collective import collective
from foretrain.cli.compare import compare
from foretrain.cli.grid import grid
from foretrain.cli.plan import plan
from foretrain.cli.record import record
from foretrain.cli.run import run, run_command
from foretrain.cli.schedule import schedule
from foretrain.cli.server import server
from foretrain.cli.share import share
from foretrain.cli.simulate import run_command as simulate_command
from foretrain.cli.simulate import simulate
from foretrain.cli.sweep import sweep
from foretrain.cli.tolerance import tolerance
from foretrain.cli.tune import tune
from foretrain.errors import ForetrainError

_DESCRIPTION = "Forecast and speed up distributed DNN training."


def main(arguments: Sequence[str] | None = None) -> None:
    """The entry point. Exits with 0, 2 for a wrong input, 130 when interrupted, 143 when terminated."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments == ["--version"]:
        sys.stdout.write(f"foretrain {__version__}\n")
        return
    app = SubcommandApp()
    for command in (
        compare,
        tune,
        plan,
        grid,
        sweep,
        share,
        collective,
        bound,
        record,
        run,
        server,
        simulate,
        calibrate,
        tolerance,
        schedule,
        catalog,
    ):
        app.command(command)
    app.command(lab.commands(), name="lab", help=lab.HELP)
    app.command(topology.commands(), name="topology", help=topology.HELP)
    try:
        if arguments[:1] == ["run"]:
            run_command(arguments[1:])
            return
        with _terminable():
            if arguments[:1] == ["simulate"]:
                simulate_command(arguments[1:])
                return
            app.cli(
                args=arguments or ["--help"],
                prog="foretrain",
                description=_DESCRIPTION,
                config=(tyro.conf.OmitArgPrefixes,),
            )
    except ForetrainError as error:
        sys.stderr.write(f"foretrain: {error}\n")
        sys.exit(2)
    except KeyboardInterrupt:
        sys.stderr.write("foretrain: interrupted; no file was left half written\n")
        sys.exit(130)
    except (BrokenPipeError, ReaderGone):
        # The reader of our output, e.g. head, has seen enough.
        sys.stderr.close()


@contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM ends the block as Ctrl-C does, so that what a command has built is taken down."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def terminated(number: int, frame: object) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, terminated)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)
