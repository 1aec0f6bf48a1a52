"""Batches of packets that the kernel refuses, or that a path loses as a whole: a library before sendmsg does it."""

import json
import os
import subprocess
import sys

import pytest

from tests.examples.torchrun import ROOT

pytestmark = pytest.mark.process

SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <sys/socket.h>

ssize_t sendmsg(int socket, const struct msghdr *message, int flags) {
    ssize_t (*real)(int, const struct msghdr *, int) = dlsym(RTLD_NEXT, "sendmsg");
    for (struct cmsghdr *c = CMSG_FIRSTHDR(message); c; c = CMSG_NXTHDR((struct msghdr *)message, c))
        if (c->cmsg_level == IPPROTO_UDP && c->cmsg_type == 103 /* UDP_SEGMENT */) {
            errno = EIO;
            return getenv("VANISH") ? 0 : -1;
        }
    return real(socket, message, flags);
}
"""
SCRIPT = """
import json
import numpy as np
from tests.comm.bounded.group import group
from tests.comm.collectives.test_ring import inputs, run

with group(2, blocked=60.0, timeout=60.0) as members:
    for seed in range(3):
        arrays, total = inputs("float32", 2, 400_000, seed)
        run(members, "all_reduce", arrays)
        np.testing.assert_array_equal(arrays[1], total)
    print(json.dumps([each.engine.counted() for each in members]))
"""
PACKETS = 3 * 2 * 98
"""Those of one rank, of 8,192 bytes: it sends half the array, and then its sum."""


@pytest.mark.parametrize(("what", "most"), [("REFUSE", 1.2), ("VANISH", 8)])
def test_packets_go_one_by_one_where_batches_do_not(tmp_path, what, most):
    source, shim = tmp_path / "shim.c", tmp_path / "shim.so"
    source.write_text(SHIM)
    subprocess.run(["gcc", "-shared", "-fPIC", source, "-o", shim, "-ldl"], check=True)
    environment = os.environ | {"LD_PRELOAD": str(shim), what: "1"}
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    for counted in json.loads(ran.stdout):
        assert PACKETS <= counted["sent"] < most * PACKETS
        assert not counted["over_tcp"]
