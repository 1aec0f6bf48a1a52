"""A command whose reader is gone ends, whatever it is doing."""

import subprocess
import sys

from tests.processes import started

_BLOCK = """
import time
from foretrain.cli.broken_pipe import ReaderGone, while_read

try:
    with while_read():
        print("on", flush=True)
        while True:
            try:
                time.sleep(0.01)
            except (Exception, ConnectionError):
                pass
except ReaderGone:
    raise SystemExit(7)
"""


def test_block_ends_although_it_passes_over_errors_of_its_own_pipes() -> None:
    with started([sys.executable, "-c", _BLOCK], stdout=subprocess.PIPE, text=True) as block:
        assert block.stdout
        assert block.stdout.readline() == "on\n"
        block.stdout.close()
        assert block.wait(timeout=60) == 7


def test_block_that_is_read_goes_on() -> None:
    text = "from foretrain.cli.broken_pipe import while_read\nwith while_read():\n    print('all of it')\n"
    ended = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    assert ended.stdout == "all of it\n"
