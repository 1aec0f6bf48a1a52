"""The clocks are replaced for good, so each test has a process of its own."""

import subprocess
import sys
import time

import pytest

pytest.importorskip("torch")

import torch

from tests.live.command import on_gpus

HOST = """
import datetime, time
plain, real = datetime.datetime, time.monotonic
from foretrain.live.device import clocks
passed = [0]
clocks.install(lambda: passed[0], lambda spent: passed.__setitem__(0, passed[0] + spent))
"""


def told(code: str) -> str:
    return subprocess.run([sys.executable, "-c", HOST + code], capture_output=True, text=True, check=True).stdout


def test_sleeping_and_reading_pass_virtual_time() -> None:
    assert told("begin = time.monotonic_ns(); time.sleep(2); print(time.monotonic_ns() - begin)") == "2000000100\n"
    assert told("print(time.perf_counter(), time.process_time(), time.thread_time_ns())") == "1e-07 2e-07 300\n"
    assert told("begin = time.time_ns(); passed[0] += 10**12; print(time.time_ns() - begin)") == "1000000100\n"
    code = "begin = datetime.datetime.now(); time.sleep(3600); print((datetime.datetime.now() - begin).seconds)"
    assert told(code) == "3600\n"
    code = """
import timeit
begin = timeit.default_timer()
passed[0] += 3 * 10**12
print(round(timeit.default_timer() - begin, 3), round(timeit.timeit(lambda: time.sleep(2), number=2), 3))
"""
    assert told(code) == "3.0 4.0\n"


def test_other_threads_leave_the_clock_of_the_script_alone() -> None:
    code = """
import threading
def report():
    while True:
        time.sleep(0.001)
        reports.append(time.time())
reports = []
threading.Thread(target=report, daemon=True).start()
while len(reports) < 3:
    pass
def wait(pause):
    until = time.monotonic() + 0.002
    while time.monotonic() < until:
        pause()
for pause in (lambda: time.sleep(0.001), lambda: None):  # its deadline passes while the script waits for it
    thread = threading.Thread(target=wait, args=(pause,))
    thread.start()
    thread.join()
print(passed[0])
"""
    assert told(code) == "0\n"


def test_who_polls_sleeps_for_real_too_so_that_others_get_on() -> None:
    code = """
import os, subprocess, sys, tempfile
with tempfile.TemporaryDirectory() as folder:
    path = os.path.join(folder, "done")
    late = "import sys, time; time.sleep(1); open(sys.argv[1], 'w').close()"
    subprocess.Popen([sys.executable, "-c", late, path])
    polls = 0
    while not os.path.exists(path):
        time.sleep(0.5)
        polls += 1
print(polls < 1000, passed[0] == polls * 5 * 10**11)
"""
    assert told(code) == "True True\n"


def test_dates_are_still_dates() -> None:
    code = """
import pickle
now = datetime.datetime.now(datetime.UTC)
print(isinstance(now, plain), isinstance(plain(2020, 1, 1), datetime.datetime), datetime.datetime is plain)
print(pickle.loads(pickle.dumps(now)) == now, isinstance(now + datetime.timedelta(1), datetime.datetime))
"""
    assert told(code) == "True True True\nTrue True\n"


def test_what_waits_for_other_processes_keeps_the_real_clocks() -> None:
    code = """
import multiprocessing.connection
one, other = multiprocessing.connection.Pipe()
print(multiprocessing.connection.wait([one], timeout=0.01), multiprocessing.connection.time.monotonic is real)
import asyncio
asyncio.run(asyncio.sleep(0.01))
"""
    assert told(code) == "[] True\n"


@on_gpus()
def test_polling_for_long_takes_few_queries_and_is_over_in_time() -> None:
    a = torch.empty(8192, 8192, device="cuda")
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    begin.record()
    since = time.perf_counter()
    for _ in range(100):
        torch.mm(a, a)
    end.record()
    queries = 0
    while not end.query():
        queries += 1
    waited = time.perf_counter() - since
    assert queries < 10_000
    computed = begin.elapsed_time(end) / 1e3
    assert computed > 0.1
    assert computed <= waited <= computed * (1 + 1 / 512) + 1e-5
