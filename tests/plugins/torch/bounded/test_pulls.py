"""attach(BoundedLoss(updates="servers")): parameters come from a server over UDP, and some of them may be lost.

Without losses, two workers get the bits of DistributedDataParallel.
"""

import contextlib
import re
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from foretrain.comm import rendezvous
from foretrain.comm.bounded.server import SummingServer
from foretrain.comm.coordinator.addresses import decoded, encoded
from foretrain.comm.options import BoundedLoss
from foretrain.errors import ConfigError, ForetrainError
from foretrain.plugins.torch import attach
from foretrain.plugins.torch.ps.remote_optimizer import _shaped
from tests.comm.bounded.relay import Network, losing
from tests.plugins.torch.bounded.forked_servers import ForkedServers
from tests.plugins.torch.models import (
    EACH,
    SMALL,
    WARMUP,
    WIDTH,
    assert_same,
    batch,
    branching,
    copied,
    differences,
    mlp,
    objective,
    plain,
    sgd,
)
from tests.plugins.torch.ps.test_updates_on_servers import OPTIMIZERS, grouped
from tests.plugins.torch.test_attach_gradients import accumulating
from tests.plugins.torch.test_attach_optimizers import unfreezing
from tests.plugins.torch.test_attach_schedules import ROUNDING
from tests.plugins.torch.test_attach_state import adam, looked_at, on_rank_zero
from tests.processes import need

SERVED = BoundedLoss(0.0, "ps", updates="servers")


@pytest.fixture
def ranks(ranks, request):
    """Two ranks whose servers are forked, except in the smoke test."""
    return ranks if request.node.get_closest_marker("smoke") else ForkedServers(ranks)


@pytest.fixture
def three(three):
    """Three ranks whose servers are forked."""
    return ForkedServers(three)


@pytest.fixture
def forked_job(job):
    """As `job`, with servers that are forked."""
    return lambda size: ForkedServers(job(size))


@pytest.mark.parametrize("name", ["momentum", "amsgrad", "asgd"])
@pytest.mark.smoke_case("momentum")
def test_every_optimizer_with_groups_and_a_learning_rate_schedule(ranks, name):
    schedule = "bytescheduler(partition=100KiB, credit=200KiB)"
    assert_same(ranks, grouped, *OPTIMIZERS[name], transport=SERVED, schedule=schedule)


@pytest.mark.parametrize("schedule", ["ddp(bucket=4KiB, first=1KiB)", "dear(group=4KiB)"])
def test_buckets_and_schedules_that_push_and_pull_apart(ranks, schedule):
    assert_same(ranks, plain, transport=SERVED, schedule=schedule)


def test_three_workers(three):
    assert_same(three, plain, tolerance=ROUNDING, transport=SERVED)


@pytest.mark.parametrize("how", [EACH, "nobody's until late"])
def test_branches(ranks, how):
    assert_same(ranks, branching, how, transport=SERVED)


def test_accumulation(ranks):
    assert_same(ranks, accumulating, (2,), True, transport=SERVED)


def test_one_rank_writes_checkpoints(ranks):
    assert_same(ranks, on_rank_zero, transport=SERVED)


def test_a_checkpoint_of_adam_is_whole(ranks):
    assert_same(ranks, looked_at, ["file"] * 9, 1, adam, transport=SERVED)


def test_a_group_added_under_way(ranks):
    assert_same(ranks, unfreezing, 5, transport=SERVED)


def test_a_single_rank_updates_its_own_parameters(alone):
    assert_same(alone, plain, transport=SERVED)


# ---------------------------------------------------------------- losses


@contextlib.contextmanager
def losing_packets(share):
    """Lose a share of this rank's packets to the server, and on rank 0 of the server's to all ranks."""
    gathered, told, seen = rendezvous._gather_with, SummingServer.tell, []

    def gather_with(server, control, values):
        rows = gathered(server, control, values)
        seen.append(rows)
        return [*rows[:-1], in_front_of(rows[-1])] if len(seen) == 2 else rows  # the addresses of UDP

    def tell(server, message):
        if isinstance(message, list) and len(seen) == 1:
            message = [*map(in_front_of, message[:-1]), message[-1]]
        told(server, message)

    with Network(losing(share)) as network, pytest.MonkeyPatch.context() as patch:
        in_front_of = lambda row: encoded(*network.in_front_of(decoded(row)))  # noqa: E731
        patch.setattr(rendezvous, "_gather_with", gather_with)
        patch.setattr(SummingServer, "tell", tell)
        yield


def pulling(steps):
    """Each step's parameters are the server's, or, where a packet was lost, what they were."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 1024), nn.Tanh(), nn.Linear(1024, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    transport = BoundedLoss(0.3, "ps", reliable_steps=1, reliable_bytes=0, updates="servers")
    kept = 0
    with losing_packets(0.1), attach(model, optimizer, "fifo", warmup=WARMUP, transport=transport) as job:
        train(model, optimizer, steps=WARMUP + 2, width=64)
        for step in range(steps):
            before = [parameter.detach().clone() for parameter in model.parameters()]
            train(model, optimizer, steps=1, width=64, first=step)
            job._runtime.updates.wait_wanted()
            remote = job._runtime.remote
            for task, found in remote._fetched(range(4)):
                (name, now), then = job._named[task], before[task]
                server = _shaped(now, found.parameter)
                lost = now.detach() != server
                assert torch.equal(now.detach()[lost], then[lost])
                assert not (lost.any() and name.endswith("bias"))
                kept += int(lost.sum())
        counts = job.ledger.kept[:, job.rank].copy(), dict(zip(job.ledger.names, range(4), strict=True))
        saved = {name: value.clone() for name, value in model.state_dict().items()}
        server = dict(job._runtime.remote._fetched(range(4)))
        for task, (name, parameter) in enumerate(job._named):
            assert torch.equal(saved[name], _shaped(parameter, server[task].parameter))
        state = optimizer.state_dict()
        train(model, optimizer, steps=2, width=64)
    return kept, counts, state, copied([*model.parameters()]), job.ledger.line(), job.ledger.kept


def train(model, optimizer, steps, width, first=0):
    for step in range(first, first + steps):
        objective(model(batch(step, width=width))).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_what_a_pull_loses_keeps_its_value_for_a_step_and_checkpoints_and_the_end_are_the_servers(ranks):
    (kept, counts, state, ended, line, by_rank), other = ranks(pulling, 6)
    assert kept > 0
    assert other[0] > 0
    for (of_tensor, places), rank in ((counts, 0), (other[1], 1)):
        assert of_tensor[places["0.weight"]] > 0
        assert of_tensor[places["0.bias"]] == of_tensor[places["2.bias"]] == 0
        assert (by_rank[:, rank] >= of_tensor).all()
    assert not differences([state, ended], [other[2], other[3]], 0.0)
    assert re.match(
        r"\d+\.\d\d% of the gradients' bytes were lost, most of .*weight, \d+% from rank [01]; "
        r"\d+\.\d\d% of the pulled parameters' kept their previous value, most of .*weight, \d+% on rank [01]",
        line,
    )


def optimizing_the_head(steps):
    """Trains a model of which only the last layer has an optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 1024), nn.Tanh(), nn.Linear(1024, 64))
    before = copied([*model.parameters()])
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)
    transport = BoundedLoss(0.3, "ps", reliable_steps=1, reliable_bytes=0, updates="servers")
    with losing_packets(0.1), attach(model, optimizer, "fifo", warmup=WARMUP, transport=transport) as job:
        for step in range(WARMUP + steps):
            objective(model(batch(step, width=64))).backward()
            optimizer.step()
            model.zero_grad()
        kept = dict(zip(job.ledger.names, job.ledger.kept[:, job.rank].tolist(), strict=True))
        model.state_dict()
    return before, copied([*model.parameters()]), kept


def test_parameters_without_an_optimizer_stay_what_they_are(ranks):
    (before, after, kept), (_, other, others) = ranks(optimizing_the_head, 12)
    assert kept["0.weight"] + others["0.weight"] > 0
    assert not differences(after, other, 0.0)
    for task in range(4):
        assert torch.equal(before[task], after[task]) == (task < 2)


def saving_between(steps):
    """Saves the model between two backward passes of a step, and between the last of them and step()."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 1024), nn.Tanh(), nn.Linear(1024, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    transport = BoundedLoss(0.3, "ps", reliable_steps=1, reliable_bytes=0, updates="servers")
    stale, errors = 0, []
    with losing_packets(0.1), attach(model, optimizer, "fifo", warmup=WARMUP, transport=transport) as job:
        for step in range(WARMUP + steps):
            objective(model(batch(2 * step, width=64))).backward()
            if step > WARMUP:
                stale += len(job._runtime.remote._stale)
                saved = {name: value.clone() for name, value in model.state_dict().items()}
                server = dict(job._runtime.remote._fetched(range(4)))
                for task, (name, parameter) in enumerate(job._named):
                    assert torch.equal(saved[name], _shaped(parameter, server[task].parameter))
            objective(model(batch(2 * step + 1, width=64))).backward()
            if step > WARMUP:
                try:
                    model.state_dict()
                except ConfigError as error:
                    errors.append(str(error))
            optimizer.step()
            optimizer.zero_grad()
    return stale, errors


def test_a_checkpoint_between_two_backward_passes_is_the_servers_and_after_the_last_one_an_error(ranks):
    (stale, errors), (others_stale, others_errors) = ranks(saving_between, 10)
    assert stale + others_stale > 0
    for each in (errors, others_errors):
        assert len(each) == 9
        assert "was not called for gradients with which servers have updated" in each[0]


def learning(tolerance, file):
    """Accuracy on digits that were held out."""
    digits = torch.from_numpy(np.loadtxt(file, np.float32, delimiter=","))
    images, labels = digits[:, :-1] / 16, digits[:, -1].long()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.002)
    transport = BoundedLoss(tolerance, "ps", reliable_bytes=0, updates="servers")
    mine = torch.arange(dist.get_rank(), 1500, 2)
    with losing_packets(tolerance), attach(model, optimizer, "p3", warmup=WARMUP, transport=transport) as job:
        for step in range(80):
            chosen = mine[torch.randint(len(mine), (64,), generator=torch.Generator().manual_seed(step))]
            nn.functional.cross_entropy(model(images[chosen]), labels[chosen]).backward()
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        right = (model(images[1500:]).argmax(1) == labels[1500:]).double().mean()
    return float(right), copied([*model.parameters()]), job.ledger.kept.sum()


@pytest.mark.parametrize("tolerance", [0.01, 0.02])
def test_digits_are_learnt_though_parameters_are_lost(ranks, tolerance):
    need("sklearn", "examples")
    # Read without the package, whose import takes longer than the training.
    file = Path(find_spec("sklearn").origin).parent / "datasets" / "data" / "digits.csv.gz"
    (accuracy, parameters, kept), (other, others, _) = ranks(learning, tolerance, file)
    assert accuracy == other > 0.85
    assert not differences(parameters, others, 0.0)
    assert kept > 0


# ---------------------------------------------------------------- what is refused, and failures


def attaching(compression=None, make=sgd, updates="servers"):
    model = mlp()
    try:
        attach(model, make(model), transport=BoundedLoss(0.01, "ps", updates=updates), compression=compression)
    except ConfigError as error:
        return str(error)
    return "nothing was refused"


def lbfgs(model):
    return torch.optim.LBFGS(model.parameters())


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"compression": "bf16"}, r"compression: 'bf16' is not for updates on servers under bounded loss"),
        ({"make": lbfgs}, r"optimizer: 'LBFGS' cannot run on servers: .*; write updates='workers', or one of SGD"),
    ],
)
def test_what_cannot_run_on_a_server_is_refused(ranks, options, error):
    for found in ranks(attaching, **options):
        assert re.match(error, found)


def losing_the_server(how):
    model = mlp()
    optimizer = sgd(model)
    attached = attach(model, optimizer, SMALL, warmup=WARMUP, transport=SERVED)
    train(model, optimizer, steps=WARMUP + 2, width=WIDTH)
    if dist.get_rank() == 0:
        attached._collectives._server._process.kill()
    try:
        if how == "in a step":
            train(model, optimizer, steps=50, width=WIDTH)
        optimizer.state_dict()
    except ForetrainError as error:
        attached._abandon(str(error))
        return str(error)
    return "nothing was noticed"


@pytest.mark.parametrize("how", ["in a step", "in a checkpoint"])
def test_a_server_that_is_lost_ends_the_job(job, forked_job, how):
    for outcome in (job if how == "in a step" else forked_job)(2).outcomes(losing_the_server, how):
        said = outcome.value or outcome.error
        assert re.search(r"the server that (sums|updates)(, a process of rank 0,)? was lost", said)


def failing_on_the_server():
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters())
    attached = attach(model, optimizer, SMALL, warmup=WARMUP, transport=SERVED)
    train(model, optimizer, steps=WARMUP + 2, width=WIDTH)
    optimizer.param_groups[0]["betas"] = (0.9,)
    try:
        train(model, optimizer, steps=50, width=WIDTH)
    except ForetrainError as error:
        attached._abandon(str(error))
        return str(error)
    return "nothing was noticed"


def test_an_error_of_an_optimizer_on_the_server_is_that_of_the_ranks(forked_job):
    for outcome in forked_job(2).outcomes(failing_on_the_server):
        assert re.search(r"the optimizer of '.*' failed on its server: ValueError", outcome.value or outcome.error)
