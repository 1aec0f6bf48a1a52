"""When a rank fails, every rank ends soon, and names the lost rank and what was in flight."""

import contextlib
import gc
import hashlib
import os
import re
import signal
import socket
import sys
import threading
import time
from types import MappingProxyType

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from foretrain.comm.coordinator.link import Link
from foretrain.comm.options import AllReduce, BoundedLoss, Timeouts
from foretrain.errors import ForetrainError
from foretrain.plugins.torch import attach
from foretrain.plugins.torch.process_group_executor import ProcessGroupExecutor
from tests.launch.forked import foretrain_run
from tests.plugins.torch.models import SMALL, WARMUP, batch, objective, pair, steps, train
from tests.plugins.torch.test_attach_life import stock

SIZE = 3
TIMEOUT = 5.0
"""Seconds after which a silent rank counts as lost, where that is tested: a busy machine starves nobody for so long."""
PATIENCE = 60.0
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


def raises_in_backward(model):
    model[2].weight.register_hook(raises)


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


def attached_mlp(**options):
    """A model, its optimizer, and the attachment, which waits long for other ranks."""
    model, optimizer = pair()
    options = {"timeouts": Timeouts(peer=3 * PATIENCE)} | options
    return model, optimizer, attach(model, optimizer, SMALL, warmup=WARMUP, **options)


def suffering(fault, victim, when, options, seconds=0.0):
    """Trains; before step ``when`` ``fault`` happens to rank ``victim``, and the others come ``seconds`` late."""
    model, optimizer, _ = attached_mlp(timeouts=Timeouts(peer=allowed(fault)), **options)
    for step in steps(model, optimizer, FAR):
        if step == when and dist.get_rank() == victim:
            fault(model)
        elif step == when:
            time.sleep(seconds)


def ends(job, fault, victim, when=MIDDLE, seconds=0.0, **options):
    """The error of each rank; all have ended, by themselves and in time, but for a victim that cannot."""
    ranks, without = job(SIZE), {victim} if fault is stopped else set()
    outcomes = ranks.outcomes(
        suffering, fault, victim, when, options, seconds, timeout=3 * PATIENCE, grace=PATIENCE, without=without
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


@pytest.mark.parametrize(
    ("fault", "victim"),
    [
        *((fault, 1) for fault in (killed, stopped, raises_in_backward, interrupted)),
        *((fault, 0) for fault in (killed, stopped, cut_off)),
    ],
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
    if fault is raises_in_backward:
        assert "ZeroDivisionError: of the test" in errors[victim]
    if fault is interrupted:
        assert last_line(errors[victim]) == "KeyboardInterrupt"


@pytest.mark.parametrize(
    ("fault", "victim", "when"),
    [(killed, 0, 1), (stopped, 1, 0)],
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


@pytest.mark.parametrize(("fault", "victim"), [(stopped, 1), (raises, 0)], ids=["stopped-1", "raises-0"])
def test_every_rank_ends_although_nobody_coordinates(job, fault, victim):
    assert_named(ends(job, fault, victim, transport=AllReduce("replay")), victim)


@pytest.mark.parametrize(
    ("fault", "victim", "over"),
    [(killed, 1, "transpose"), (stopped, 2, "ring"), (killed, 0, "ps")],
    ids=["killed-1-transpose", "stopped-2-ring", "killed-0-ps"],
)
def test_every_rank_ends_although_gradients_may_be_lost(job, fault, victim, over):
    assert_named(ends(job, fault, victim, transport=BoundedLoss(0.01, over)), victim)


@pytest.mark.parametrize("order", ["coordinator", "replay"])
def test_a_rank_that_leaves_is_named_although_all_knew_it_before_they_needed_it(job, order):
    """The others come a second late to the step that they need it in."""
    assert_named(ends(job, leaves, 0, seconds=1.0, transport=AllReduce(order)), 0)


def with_an_optimizer_that_fails(victim):
    model, optimizer, _ = attached_mlp()
    for step in steps(model, optimizer, FAR):
        if step == MIDDLE and dist.get_rank() == victim:
            for state in optimizer.state.values():
                state["momentum_buffer"] = torch.zeros(3, 5, 7)


def test_an_optimizer_that_fails_in_an_update_behind_the_script_ends_every_rank(job):
    ranks = job(SIZE)
    outcomes = ranks.outcomes(with_an_optimizer_that_fails, 1, timeout=3 * PATIENCE, grace=PATIENCE)
    assert "ForetrainError: the optimizer failed in a deferred update: RuntimeError(" in outcomes[1].error
    assert_told([outcome.error for outcome in outcomes], 1)
    assert ranks.exits(PATIENCE) == [0] * SIZE


# ---------------------------------------------------------------- waiting, and what ends it


def waiting_for_a_sleeper(victim):
    """Rank 1 sleeps in step ``MIDDLE``; ``victim``, which waits for it, gets Ctrl-C meanwhile."""
    model, optimizer, attached = attached_mlp()
    with attached:
        for step in steps(model, optimizer, FAR):
            if step == MIDDLE and dist.get_rank() == 1:
                time.sleep(4)
            if step == MIDDLE and dist.get_rank() == victim:
                threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()


def test_ctrl_c_ends_a_rank_that_waits_for_another(job):
    ranks = job(SIZE)
    outcomes = ranks.outcomes(waiting_for_a_sleeper, 2, timeout=3 * PATIENCE, grace=PATIENCE)
    assert last_line(outcomes[2].error) == "KeyboardInterrupt"
    assert_told([outcome.error for outcome in outcomes], 2)
    assert ranks.exits(PATIENCE) == [0] * SIZE


def slow_but_alive(when):
    """A rank that computes for longer than the timeout is not lost: it says that it is alive."""
    model, optimizer, attached = attached_mlp(timeouts=Timeouts(peer=TIMEOUT))
    with attached:
        for step in steps(model, optimizer, MIDDLE + 2):
            if step == when and dist.get_rank() == 1:
                time.sleep(TIMEOUT + 1)
    return step + 1


@pytest.mark.parametrize("when", [0, MIDDLE])
def test_a_rank_that_is_only_slow_is_not_lost(job, when):
    assert job(2)(slow_but_alive, when) == [MIDDLE + 2] * 2


def paused_in_the_middle(count, options, environment):
    """Prints each step, so that the test can stop all ranks in one."""
    os.environ |= environment
    model, optimizer, attached = attached_mlp(timeouts=Timeouts(peer=TIMEOUT), **options)
    with attached:
        for step in steps(model, optimizer, count):
            print(f"in step {step}.", flush=True)
            time.sleep(0.01)
    return step + 1


def assert_a_pause_loses_nobody(ranks, when, options, environment=MappingProxyType({}), beside=()):
    """All of the job, and processes ``beside`` it, stop for longer than a rank may be silent, as if paused."""
    ranks(dist.is_initialized)  # they have begun

    def pause():
        deadline = time.monotonic() + PATIENCE
        while f"in step {when}." not in ranks.wrote(0) and time.monotonic() < deadline:
            time.sleep(0.002)
        for number, seconds in ((signal.SIGSTOP, TIMEOUT + 1), (signal.SIGCONT, 0)):
            for pid in [*ranks.pids, *beside]:
                os.kill(pid, number)
            time.sleep(seconds)

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
    model, optimizer, _ = attached_mlp(timeouts=Timeouts(3 * PATIENCE, stall), transport=AllReduce(order))
    for step in steps(model, optimizer, FAR):
        if step == MIDDLE and dist.get_rank() == 1:
            time.sleep(3 * PATIENCE)


@pytest.mark.parametrize(
    ("order", "who"),
    [("coordinator", "not ready on rank 1"), ("replay", "this rank is ready, another rank is not")],
)
def test_a_rank_that_never_comes_ends_by_the_stall_timeout(job, order, who):
    line = job(2).outcomes(never_steps, 3.0, order, timeout=3 * PATIENCE, grace=PATIENCE, without={1})[0].error
    assert "StallError" in line
    assert who in line


def ends_early(counts):
    """Ranks make different numbers of steps, and close."""
    model, optimizer, attached = attached_mlp()
    with attached:
        train(model, optimizer, counts[dist.get_rank()])


@pytest.mark.parametrize("counts", [(MIDDLE, MIDDLE + 2, MIDDLE + 2), (MIDDLE + 2, MIDDLE, MIDDLE + 2)], ids=str)
def test_a_rank_that_finishes_early_is_named(job, counts):
    ranks = job(SIZE)
    outcomes = ranks.outcomes(ends_early, counts, timeout=3 * PATIENCE, grace=PATIENCE)
    early = counts.index(MIDDLE)
    assert not outcomes[early].error
    assert_told([outcome.error for outcome in outcomes], early)


def accumulates_differently():
    """Rank 1 forgets no_sync: it runs a backward pass more than the others."""
    model, optimizer, _ = attached_mlp()
    for step in steps(model, optimizer, FAR):
        if dist.get_rank() == 1 and step == MIDDLE:
            objective(model(batch(step))).backward()


def looks_in_between():
    """Rank 0 alone reads gradients between the two passes of each step: it would need the others' there and then."""
    model, optimizer, _ = attached_mlp()
    for step in steps(model, optimizer, FAR):
        objective(model(batch(step))).backward()
        if dist.get_rank() == 0 and step > MIDDLE:
            assert model[0].weight.grad is not None


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (accumulates_differently, r"backward\(\) ran again before step\(\) on some ranks.*rank \d"),
        (looks_in_between, r"read \.grad in between on all ranks or on none"),
    ],
)
def test_ranks_that_differ_in_their_backward_passes_are_told(job, script, message):
    for outcome in job(2).outcomes(script, timeout=3 * PATIENCE, grace=PATIENCE):
        assert re.search(f"Disagreement.*{message}", outcome.error), outcome.error


def issues_otherwise(order):
    """Rank 1 has issued something that the others have not: its hash differs from then on."""
    model, optimizer, _ = attached_mlp(transport=AllReduce(order, check_every=1))
    for step in steps(model, optimizer, FAR):
        if step == MIDDLE and dist.get_rank() == 1:
            (executor,) = (thing for thing in gc.get_objects() if isinstance(thing, ProcessGroupExecutor))
            executor._digest.update(b"another collective")


@pytest.mark.parametrize("order", ["coordinator", "replay"])
def test_ranks_that_have_issued_different_collectives_are_told(job, order):
    for rank, outcome in enumerate(job(2).outcomes(issues_otherwise, order, timeout=3 * PATIENCE, grace=PATIENCE)):
        line = last_line(outcome.error)
        assert re.search(r"Disagreement: .*has issued other collectives than.*sequence \d+", line), outcome.error
        assert "rank 1" in line or (order == "replay" and rank == 1), line


def threads_after_failure():
    """A script that catches the error closes, and has no thread of ours any more."""
    before = set(threading.enumerate())
    model, optimizer, attached = attached_mlp()
    try:
        for step in steps(model, optimizer, FAR):
            if step == MIDDLE and dist.get_rank() == 1:
                os._exit(0)
    except Exception:
        attached.close()
    return sorted(thread.name for thread in set(threading.enumerate()) - before)


@pytest.mark.smoke
def test_no_thread_outlives_a_failure(job):
    outcomes = job(SIZE).outcomes(threads_after_failure, timeout=3 * PATIENCE, grace=PATIENCE)
    assert [outcome.value for rank, outcome in enumerate(outcomes) if rank != 1] == [[], []]


def aborted(how):
    """On which device how many groups were aborted, each time; `abort` then leaves gloo's, see test_work_wait."""
    seen = []
    module = sys.modules["foretrain.plugins.torch.process_groups"]
    module.abort = lambda device, *groups: seen.append((device.type, len(set(groups))))
    model, optimizer, attached = attached_mlp()
    with contextlib.suppress(ForetrainError, ZeroDivisionError), attached:
        for step in steps(model, optimizer, 2 * MIDDLE):
            if step == MIDDLE and dist.get_rank() == 1:
                how(model)
    return seen


def nothing(model):
    pass


@pytest.mark.parametrize(("how", "expected"), [(raises, [("cpu", 2)]), (nothing, [])], ids=["raises", "nothing"])
def test_collectives_are_aborted_once_and_only_after_a_fault(job, how, expected):
    assert job(SIZE)(aborted, how) == [expected] * SIZE


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
print(f"{begin}\\n", end="", flush=True)
dist.destroy_process_group()
"""


def test_a_restarted_job_ends_like_an_uninterrupted_one(ranks, tmp_path):
    script, checkpoint = tmp_path / "train.py", tmp_path / "checkpoint.pt"
    script.write_text(SCRIPT)
    ran = foretrain_run("--max-restarts", 1, "--", script, checkpoint, folder=tmp_path)
    assert ran.returncode == 0, ran.stderr[-4000:]
    begins = ran.stdout.split()
    # Rank 1 dies once step 6 is reduced everywhere: rank 0 has written "6" by then, and "7" and "8" if it was quick.
    assert begins in (["6", "6"], ["7", "7"], ["8", "8"])
    saved = torch.load(checkpoint)
    assert saved["step"] == 14
    data = b"".join(tensor.numpy().tobytes() for tensor in saved["model"].values())
    assert hashlib.sha256(data).hexdigest() == ranks(stock, 14)[0]
