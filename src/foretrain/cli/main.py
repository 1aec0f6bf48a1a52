"""``foretrain``: parses the command line, runs one command, and reports errors as one plain message."""

from __future__ import annotations

import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import tyro
from tyro.extras import SubcommandApp

from foretrain import __version__
from foretrain.cli import lab, topology
from foretrain.cli.calibrate import calibrate
from foretrain.cli.compare import bound, catalog, compare, schedule
from foretrain.cli.doctor import doctor
from foretrain.cli.plan import plan, tune
from foretrain.cli.progress import StdoutClosed
from foretrain.cli.record import record
from foretrain.cli.run import run, run_command, server
from foretrain.cli.simulate import run_command as simulate_command
from foretrain.cli.simulate import simulate
from foretrain.cli.sweep import grid, sweep
from foretrain.cli.tolerance import tolerance
from foretrain.cli.topology import collective, share
from foretrain.errors import ForetrainError

_DESCRIPTION = "Forecast and speed up distributed DNN training."


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command. Exits with 0, 2 for a wrong input, 130 when interrupted, 143 when terminated."""
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
        doctor,
        schedule,
        catalog,
    ):
        app.command(command)
    for group, module in (("lab", lab), ("topology", topology)):
        subcommands = SubcommandApp()
        for name, command in module.COMMANDS.items():
            subcommands.command(command, name=name)
        app.command(subcommands, name=group, help=module.HELP)
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
    except AssertionError as error:
        frames = traceback.extract_tb(error.__traceback__)
        if Path(frames[-1].filename).is_relative_to(Path(__file__).parents[1]):  # not one of the user's own
            error.add_note(
                "foretrain: this is a fault of foretrain, not of your script or input; please send its developers "
                "all of the above, the command, what `foretrain doctor` prints, and the smallest script that shows it"
            )
        raise
    except (BrokenPipeError, StdoutClosed):
        # The reader of stdout, e.g. head, has ended.
        sys.stderr.close()


@contextmanager
def _terminable() -> Iterator[None]:
    """End the block on SIGTERM as on Ctrl-C, so that a command removes what it has built."""
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
