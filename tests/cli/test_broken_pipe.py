"""A command whose reader is gone ends, whatever it is doing."""

import subprocess
import sys

from tests.processes import started

_BLOCK = """
import time
from foretrain.cli.progress import StdoutClosed, end_with_reader

try:
    with end_with_reader():
        print("on", flush=True)
        while True:
            try:
                time.sleep(0.01)
            except (Exception, ConnectionError):
                pass
except StdoutClosed:
    raise SystemExit(7)
"""


def test_block_ends_although_it_passes_over_errors_of_its_own_pipes() -> None:
    with started([sys.executable, "-c", _BLOCK], stdout=subprocess.PIPE, text=True) as block:
        assert block.stdout
        assert block.stdout.readline() == "on\n"
        block.stdout.close()
        assert block.wait(timeout=60) == 7


def test_block_that_is_read_goes_on() -> None:
    text = "from foretrain.cli.progress import end_with_reader\nwith end_with_reader():\n    print('all of it')\n"
    ended = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    assert ended.stdout == "all of it\n"
