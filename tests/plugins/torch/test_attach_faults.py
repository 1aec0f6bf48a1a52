"""When something goes wrong in one rank, every rank ends soon, and says who was lost and what was under way."""

import contextlib
import gc
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from types import MappingProxyType

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

from foretrain.comm.coordinator.link import Link  # noqa: E402
from foretrain.comm.options import AllReduce, Timeouts  # noqa: E402
from foretrain.errors import ForetrainError  # noqa: E402
from foretrain.plugins.torch import attach  # noqa: E402
from foretrain.plugins.torch.collective_executor import CollectiveExecutor  # noqa: E402
from tests.plugins.torch.models import SMALL, WARMUP, Stock, batch, mlp, objective, sgd  # noqa: E402
from tests.plugins.torch.ranks import QUIET, ROOT  # noqa: E402

SIZE = 3
TIMEOUT = 3.0
"""attach's: seconds after which a silent rank counts as lost."""
PATIENCE = 20.0
"""Seconds for a rank to fail and to end; far more than it takes, far less than forever."""
MIDDLE = WARMUP + 4
FAR = 2000
"""Steps nobody should reach."""


# ---------------------------------------------------------------- what may happen to a rank


def killed(model):
    os.kill(os.getpid(), signal.SIGKILL)


def killed_beside_workers(model):
    """The loader's worker, forked with copies of all descriptors, lives on until it looks for its parent: 5 s."""
    workers = iter(DataLoader(range(8), num_workers=1, multiprocessing_context="fork"))
    next(workers)
    killed(model)


def stopped(model):
    os.kill(os.getpid(), signal.SIGSTOP)


def raises(model):
    raise ZeroDivisionError("of the test")


def raises_in_forward(model):
    model[2].register_forward_pre_hook(raises_here)


def raises_here(*_):
    raise ZeroDivisionError("of the test")


def raises_in_backward(model):
    model[2].weight.register_hook(raises_here)


def interrupted(model):
    os.kill(os.getpid(), signal.SIGINT)


def leaves(model):
    raise SystemExit


def cut_off(model):
    """Every link of the coordinator that this rank has."""
    links = [thing for thing in gc.get_objects() if isinstance(thing, Link) and thing.fileno() >= 0]
    assert links
    for link in links:
        with contextlib.suppress(OSError):  # its thread may close the second when the first is gone
            link._socket.shutdown(socket.SHUT_RDWR)


def allowed(fault):
    """Seconds of silence: only who is stopped, and a server that is gone, is known by it, and the others at once."""
    return TIMEOUT if fault in (stopped, None) else 3 * PATIENCE


def suffering(fault, victim, when, options):
    """Trains; before step ``when`` ``fault`` happens to rank ``victim``."""
    model = mlp()
    optimizer = sgd(model)
    attach(model, optimizer, SMALL, warmup=WARMUP, timeouts=Timeouts(peer=allowed(fault)), **options)
    for step in range(FAR):
        if step == when and dist.get_rank() == victim:
            fault(model)
        objective(model(batch(step))).backward()
        optimizer.step()
        optimizer.zero_grad()


def ends(job, fault, victim, when=MIDDLE, **options):
    """What each rank said at its end; all have ended, by themselves and in time, but for a victim that cannot."""
    ranks, without = job(SIZE), {victim} if fault is stopped else set()
    outcomes = ranks.outcomes(
        suffering, fault, victim, when, options, timeout=3 * PATIENCE, grace=PATIENCE, without=without
    )
    for rank, code in enumerate(ranks.exits(PATIENCE, without)):
        if rank not in without:
            expected = -signal.SIGKILL if rank == victim and fault in (killed, killed_beside_workers) else 0
            assert code == expected, f"rank {rank}: {outcomes[rank].error}\n{ranks.wrote(rank)}"
    return [outcome.error for outcome in outcomes]


def last_line(error):
    return error.strip().rpartition("\n")[2]


def assert_told(errors, victim):
    """Every other rank's error is one of foretrain's: who was lost, at which sequence, in which task or step."""
    for rank, error in enumerate(errors):
        if rank != victim:
            line = last_line(error)
            assert re.match(r"foretrain\.errors\.(PeerLost|StallError)", line), error
            assert re.search(rf"rank {victim}\b", line), line
            assert re.search(r"sequence -?\d+", line), line
            assert re.search(r"task '[\w.]+'|step \d+", line), line


def assert_named(errors, victim):
    """Every other rank's error is one of foretrain's, and says who was lost."""
    for rank, error in enumerate(errors):
        if rank != victim:
            line = last_line(error)
            assert re.match(rf"foretrain\.errors\.PeerLost.*\brank {victim}\b", line), error


FAULTS = [killed, stopped, raises, raises_in_forward, raises_in_backward, interrupted, leaves, cut_off]


# Of the coordinator, rank 0, only what a link shows otherwise than another rank's.
@pytest.mark.parametrize(
    ("fault", "victim"),
    [*((fault, 1) for fault in FAULTS), (killed, 0), (stopped, 0), (cut_off, 0)],
    ids=lambda value: getattr(value, "__name__", value),
)
@pytest.mark.smoke_case("killed-1")
def test_every_rank_ends_and_says_whom_it_lost(job, fault, victim):
    errors = ends(job, fault, victim)
    if fault is not cut_off:
        assert_told(errors, victim)
    else:
        # Who finds the link broken cannot tell at which end: rank 0 blames the others, and they blame rank 0.
        for error in errors:
            assert re.search(r"PeerLost.*rank \d.*sequence \d+", last_line(error)), error
    if fault in (raises, raises_in_forward, raises_in_backward):
        assert "ZeroDivisionError: of the test" in errors[victim]
    if fault is interrupted:
        assert last_line(errors[victim]) == "KeyboardInterrupt"


@pytest.mark.parametrize(
    ("fault", "victim", "when"),
    [(killed, 0, 1), (stopped, 1, 0), (raises, 1, 0), (leaves, 0, 1)],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_every_rank_ends_although_scheduling_has_not_begun(job, fault, victim, when):
    assert_named(ends(job, fault, victim, when), victim)


@pytest.mark.parametrize(("order", "victim"), [("coordinator", 0), ("replay", 1)])
def test_a_killed_rank_is_gone_although_its_workers_live_on(job, order, victim):
    errors = ends(job, killed_beside_workers, victim, transport=AllReduce(order))
    assert_named(errors, victim)
    for error in errors:
        assert "silent" not in error


@pytest.mark.parametrize(
    ("fault", "victim"), [(killed, 0), (stopped, 1), (raises, 0)], ids=lambda value: getattr(value, "__name__", value)
)
def test_every_rank_ends_although_nobody_coordinates(job, fault, victim):
    assert_named(ends(job, fault, victim, transport=AllReduce("replay")), victim)


def left_before_the_others_come(order):
    """Rank 0 ends, and the others hear of it before they begin the step that they need it in."""
    model = mlp()
    optimizer = sgd(model)
    attach(model, optimizer, SMALL, warmup=WARMUP, timeouts=Timeouts(peer=3 * PATIENCE), transport=AllReduce(order))
    for step in range(FAR):
        if step == MIDDLE:
            if dist.get_rank() == 0:
                raise SystemExit
            time.sleep(1)
        objective(model(batch(step))).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("order", ["coordinator", "replay"])
def test_who_left_is_named_although_all_knew_it_before_they_needed_it(job, order):
    outcomes = job(SIZE).outcomes(left_before_the_others_come, order, timeout=3 * PATIENCE, grace=PATIENCE)
    assert_named([outcome.error for outcome in outcomes], 0)


# ---------------------------------------------------------------- waiting, and what ends it


def waiting_for_a_sleeper(victim):
    """Rank 1 sleeps in step ``MIDDLE``; ``victim``, which waits for it, gets Ctrl-C meanwhile."""
    model = mlp()
    optimizer = sgd(model)
    with attach(model, optimizer, SMALL, warmup=WARMUP, timeouts=Timeouts(peer=TIMEOUT)):
        for step in range(FAR):
            if step == MIDDLE and dist.get_rank() == 1:
                time.sleep(4)
            if step == MIDDLE and dist.get_rank() == victim:
                threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
            objective(model(batch(step))).backward()
            optimizer.step()
            optimizer.zero_grad()


def test_ctrl_c_ends_a_rank_that_waits_for_another(job):
    ranks = job(SIZE)
    outcomes = ranks.outcomes(waiting_for_a_sleeper, 2, timeout=3 * PATIENCE, grace=PATIENCE)
    assert last_line(outcomes[2].error) == "KeyboardInterrupt"
    assert_told([outcome.error for outcome in outcomes], 2)
    assert ranks.exits(PATIENCE) == [0] * SIZE


def slow_but_alive(seconds, when):
    """A rank that computes for longer than the timeout is not lost: it says that it is alive."""
    model = mlp()
    optimizer = sgd(model)
    with attach(model, optimizer, SMALL, warmup=WARMUP, timeouts=Timeouts(peer=seconds / 3)):
        for step in range(MIDDLE + 2):
            if step == when and dist.get_rank() == 1:
                time.sleep(seconds)
            objective(model(batch(step))).backward()
            optimizer.step()
            optimizer.zero_grad()
    return step + 1


@pytest.mark.parametrize("when", [0, 1, MIDDLE])
def test_a_rank_that_is_only_slow_is_not_lost(job, when):
    assert job(2)(slow_but_alive, 3.0, when) == [MIDDLE + 2] * 2


def paused_in_the_middle(steps, options, environment):
    """Says where it is; whoever hears it stops everybody."""
    os.environ |= environment
    model = mlp()
    optimizer = sgd(model)
    with attach(model, optimizer, SMALL, warmup=WARMUP, timeouts=Timeouts(peer=1.0), **options):
        for step in range(steps):
            print(f"in step {step}.", flush=True)
            objective(model(batch(step))).backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(0.01)
    return step + 1


def assert_a_pause_loses_nobody(ranks, when, options, environment=MappingProxyType({}), beside=()):
    """All of the job, and processes ``beside`` it, stop for longer than a rank may be silent, as if paused."""
    ranks(dist.is_initialized)  # they have begun

    def pause():
        deadline = time.monotonic() + PATIENCE
        while f"in step {when}." not in ranks.wrote(0) and time.monotonic() < deadline:
            time.sleep(0.002)
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for pid in [*ranks.pids, *beside]:
                os.kill(pid, number)
            time.sleep(2)

    thread = threading.Thread(target=pause)
    thread.start()
    try:
        assert ranks(paused_in_the_middle, 50, options, dict(environment)) == [50] * SIZE
    finally:
        thread.join()


@pytest.mark.parametrize(("order", "when"), [("coordinator", 0), ("replay", MIDDLE)])
def test_nobody_is_lost_when_the_machine_is_paused(job, order, when):
    assert_a_pause_loses_nobody(job(SIZE), when, {"transport": AllReduce(order)})


def never_steps(stall, order):
    """Rank 1 is alive, and does nothing: that ends by the stall timeout."""
    model = mlp()
    optimizer = sgd(model)
    attach(model, optimizer, SMALL, warmup=WARMUP, timeouts=Timeouts(TIMEOUT, stall), transport=AllReduce(order))
    for step in range(FAR):
        if step == MIDDLE and dist.get_rank() == 1:
            time.sleep(5 * stall)
        objective(model(batch(step))).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    ("order", "who"),
    [("coordinator", "not ready on rank 1"), ("replay", "this rank is ready, another rank is not")],
)
def test_a_rank_that_never_comes_ends_by_patience(job, order, who):
    line = job(2).outcomes(never_steps, 3.0, order, timeout=3 * PATIENCE, grace=PATIENCE, without={1})[0].error
    assert "StallError" in line
    assert who in line


def ends_early(counts):
    """Ranks make different numbers of steps, and close."""
    model = mlp()
    optimizer = sgd(model)
    with attach(model, optimizer, SMALL, warmup=WARMUP, timeouts=Timeouts(peer=3 * PATIENCE)):
        for step in range(counts[dist.get_rank()]):
            objective(model(batch(step))).backward()
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("counts", [(MIDDLE, MIDDLE + 2, MIDDLE + 2), (MIDDLE + 2, MIDDLE, MIDDLE + 2)], ids=str)
def test_a_rank_that_finishes_early_is_named(job, counts):
    ranks = job(SIZE)
    outcomes = ranks.outcomes(ends_early, counts, timeout=3 * PATIENCE, grace=PATIENCE)
    early = counts.index(MIDDLE)
    assert not outcomes[early].error
    assert_told([outcome.error for outcome in outcomes], early)


def accumulates_differently():
    """Rank 1 forgets no_sync: it runs a backward pass more than the others."""
    model = mlp()
    optimizer = sgd(model)
    attach(model, optimizer, SMALL, warmup=WARMUP, timeouts=Timeouts(peer=3 * PATIENCE))
    for step in range(FAR):
        objective(model(batch(step))).backward()
        if dist.get_rank() == 1 and step == MIDDLE:
            objective(model(batch(step))).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_ranks_that_run_different_numbers_of_backward_passes_are_told(job):
    outcomes = job(2).outcomes(accumulates_differently, timeout=3 * PATIENCE, grace=PATIENCE)
    for outcome in outcomes:
        assert re.search(
            r"Disagreement.*backward\(\) ran again before step\(\) on some ranks.*rank \d", outcome.error
        ), outcome.error


def looks_in_between():
    """Rank 0 alone reads gradients between the two passes of each step: it would need the others' there and then."""
    model = mlp()
    optimizer = sgd(model)
    attach(model, optimizer, SMALL, warmup=WARMUP, timeouts=Timeouts(peer=3 * PATIENCE))
    for step in range(FAR):
        objective(model(batch(step))).backward()
        if dist.get_rank() == 0 and step > MIDDLE:
            assert model[0].weight.grad is not None
        objective(model(batch(step))).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_rank_that_reads_gradients_between_passes_alone_is_told(job):
    for outcome in job(2).outcomes(looks_in_between, timeout=3 * PATIENCE, grace=PATIENCE):
        assert re.search(r"Disagreement.*read \.grad in between on all ranks or on none", outcome.error), outcome.error


def issues_otherwise(order):
    """Rank 1 has issued something that the others have not: its hash differs from then on."""
    model = mlp()
    optimizer = sgd(model)
    attach(
        model,
        optimizer,
        SMALL,
        warmup=WARMUP,
        timeouts=Timeouts(peer=3 * PATIENCE),
        transport=AllReduce(order, check_every=1),
    )
    for step in range(FAR):
        if step == MIDDLE and dist.get_rank() == 1:
            (carrier,) = (thing for thing in gc.get_objects() if isinstance(thing, CollectiveExecutor))
            carrier._digest.update(b"another collective")
        objective(model(batch(step))).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("order", ["coordinator", "replay"])
def test_ranks_that_have_issued_different_collectives_are_told(job, order):
    for rank, outcome in enumerate(job(2).outcomes(issues_otherwise, order, timeout=3 * PATIENCE, grace=PATIENCE)):
        line = last_line(outcome.error)
        assert re.search(r"Disagreement: .*has issued other collectives than.*sequence \d+", line), outcome.error
        assert "rank 1" in line or (order == "replay" and rank == 1), line


def threads_after_failure():
    """A script that catches the error closes, and has no thread of ours any more."""
    model = mlp()
    optimizer = sgd(model)
    before = set(threading.enumerate())
    attached = attach(model, optimizer, SMALL, warmup=WARMUP, timeouts=Timeouts(peer=3 * PATIENCE))
    try:
        for step in range(FAR):
            if step == MIDDLE and dist.get_rank() == 1:
                os._exit(0)
            objective(model(batch(step))).backward()
            optimizer.step()
            optimizer.zero_grad()
    except Exception:
        attached.close()
    return sorted(thread.name for thread in set(threading.enumerate()) - before)


@pytest.mark.smoke
def test_no_thread_outlives_a_failure(job):
    outcomes = job(SIZE).outcomes(threads_after_failure, timeout=3 * PATIENCE, grace=PATIENCE)
    assert [outcome.value for rank, outcome in enumerate(outcomes) if rank != 1] == [[], []]


def given_up(how):
    """On which device how many groups were aborted, each time; gloo's then are not, see test_waiting."""
    seen = []
    module = sys.modules["foretrain.plugins.torch.process_groups"]
    module.abort = lambda device, *groups: seen.append((device.type, len(set(groups))))
    model = mlp()
    optimizer = sgd(model)
    attached = attach(model, optimizer, SMALL, warmup=WARMUP, timeouts=Timeouts(peer=3 * PATIENCE))
    with contextlib.suppress(ForetrainError, ZeroDivisionError), attached:
        for step in range(2 * MIDDLE):
            if step == MIDDLE and dist.get_rank() == 1:
                how(model)
            objective(model(batch(step))).backward()
            optimizer.step()
            optimizer.zero_grad()
    return seen


def nothing(model):
    pass


@pytest.mark.parametrize(("how", "expected"), [(raises, [("cpu", 2)]), (nothing, [])], ids=["raises", "nothing"])
def test_what_is_under_way_is_given_up_once_and_only_after_a_fault(job, how, expected):
    assert job(SIZE)(given_up, how) == [expected] * SIZE


# ---------------------------------------------------------------- restarts

SCRIPT = """
import os, signal, sys
import torch
import torch.distributed as dist
from foretrain.plugins.torch import Timeouts, attach
from tests.plugins.torch.models import SMALL, batch, mlp, objective, sgd

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, path, first = dist.get_rank(), sys.argv[1], os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
model = mlp()
optimizer = sgd(model)
begin = 0
if os.path.exists(path):
    saved = torch.load(path)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    begin = saved["step"]
with attach(model, optimizer, SMALL, warmup=2, timeouts=Timeouts(peer=60)):
    for step in range(begin, 14):
        objective(model(batch(step))).backward()
        optimizer.step()
        if rank == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
            torch.save(state, path + ".new")
            os.replace(path + ".new", path)
        optimizer.zero_grad()
        if step == 7 and rank == 1 and first:
            os.kill(os.getpid(), signal.SIGKILL)
print(f"begun at {begin}\\n", end="", flush=True)
dist.destroy_process_group()
"""


OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Else restarted ranks find the addresses of the dead in the store, with or without us: pytorch issue 135712."""


def uninterrupted(count):
    side = Stock()
    model = mlp()
    optimizer = sgd(model)
    net = side.wrap(model, optimizer)
    for step in range(count):
        objective(net(batch(step))).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict(), optimizer.state_dict()


def test_a_restarted_job_ends_like_an_uninterrupted_one(ranks, tmp_path):
    script, checkpoint = tmp_path / "train.py", tmp_path / "checkpoint.pt"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    ran = subprocess.run(
        [*command, str(script), str(checkpoint)],
        env={**os.environ, **QUIET, **OWN_STORE, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    # Rank 1 dies once step 6 is reduced everywhere: rank 0 has written "6" by then, and "7" and "8" if it was quick.
    assert re.findall(r"begun at (\d+)", ran.stdout) in (["6", "6"], ["7", "7"], ["8", "8"])
    saved = torch.load(checkpoint)
    model, optimizer = ranks(uninterrupted, 14)[0]
    assert saved["step"] == 14
    assert all(torch.equal(saved["model"][name], model[name]) for name in model)
    for key, state in optimizer["state"].items():
        assert torch.equal(saved["optimizer"]["state"][key]["momentum_buffer"], state["momentum_buffer"])
