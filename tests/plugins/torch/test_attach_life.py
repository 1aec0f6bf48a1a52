"""What attach refuses, how it begins, what it can tell, and that it leaves nothing behind."""

import contextlib
import copy
import gc
import hashlib
import os
import subprocess
import sys
import threading
import weakref

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.multiprocessing.reductions import StorageWeakRef  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from torch.optim import lr_scheduler  # noqa: E402

from foretrain.comm.options import AllReduce  # noqa: E402
from foretrain.errors import ConfigError, Disagreement, PeerLost  # noqa: E402
from foretrain.plugins.torch import attach, builder  # noqa: E402
from tests.plugins.torch.models import (  # noqa: E402
    SMALL,
    STEPS,
    WARMUP,
    WIDTH,
    Attached,
    assert_same,
    batch,
    mlp,
    objective,
    sgd,
)
from tests.plugins.torch.ranks import QUIET, ROOT  # noqa: E402


def steps(model, optimizer, count=STEPS, first=0):
    for step in range(first, first + count):
        objective(model(batch(step))).backward()
        optimizer.step()
        optimizer.zero_grad()


def values(model):
    return [tensor.detach().clone() for tensor in [*model.parameters(), *model.buffers()]]


# ---------------------------------------------------------------- refusals


def test_without_a_process_group():
    model = mlp()
    with pytest.raises(ConfigError, match="init_process_group"):
        attach(model, sgd(model))


def wrapped():
    model = mlp()
    return DistributedDataParallel(model), sgd(model)


def wrapped_inside():
    model = nn.Sequential(mlp(1), DistributedDataParallel(mlp(1)))
    return model, sgd(model)


def sharded():
    from torch.distributed.fsdp import fully_shard

    model = mlp()
    fully_shard(model, mesh=dist.init_device_mesh("cpu", (dist.get_world_size(),)))
    return model, sgd(model)


def frozen():
    model = mlp()
    optimizer = sgd(model)
    return model.requires_grad_(False), optimizer


def foreign():
    return mlp(), sgd(mlp())


def none_at_all():
    return mlp(), []


def no_optimizer():
    model = mlp()
    return model, model.parameters()


def sparse():
    model = nn.Sequential(nn.Embedding(10, WIDTH, sparse=True), mlp(1))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def complex_valued():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, dtype=torch.complex64))
    return model, sgd(model)


def without_elements():
    model = nn.Linear(0, 4, bias=False)
    return model, sgd(model)


REFUSED = [
    (wrapped, {}, "DistributedDataParallel"),
    (wrapped_inside, {}, "DistributedDataParallel"),
    (sharded, {}, "FSDP"),
    (frozen, {}, "no parameter that requires a gradient"),
    (foreign, {}, "updates no parameter of the model"),
    (none_at_all, {}, "optimizer"),
    (no_optimizer, {}, "optimizer"),
    (None, {"schedule": "bytescheduller"}, "bytescheduler"),
    (None, {"schedule": "p3(slize=1KiB)"}, "slice"),
    (None, {"compression": "fp8"}, "fp16"),
    (None, {"transport": "replay"}, "all_reduce"),
    (None, {"timeouts": 60}, "Timeouts"),
    (None, {"warmup": 0}, "warmup"),
    (None, {"broadcast_buffers": "no"}, "broadcast_buffers"),
    (None, {"trace": 1}, "trace"),
    (complex_valued, {}, "'1.weight' is complex"),
    (without_elements, {}, "no parameter that requires a gradient"),
]


def plain_pair():
    model = mlp()
    return model, sgd(model)


def refused(make, options):
    model, optimizer = (make or plain_pair)()
    threads = threading.active_count()
    with pytest.raises(ConfigError) as caught:
        attach(model, optimizer, **options)
    assert threading.active_count() == threads
    return str(caught.value)


@pytest.mark.parametrize(("make", "options", "said"), REFUSED, ids=lambda value: getattr(value, "__name__", None))
def test_what_is_refused(ranks, make, options, said):
    for message in ranks(refused, make, options):
        assert said in message


def sparse_gradient():
    model, optimizer = sparse()
    with attach(model, optimizer):
        with pytest.raises(ConfigError) as caught:
            model(torch.arange(8)).sum().backward()
        optimizer.zero_grad()
    return str(caught.value)


def test_a_sparse_gradient_is_refused_when_it_is_seen(ranks):
    for message in ranks(sparse_gradient):
        assert "sparse" in message


def attached_twice(same_optimizer):
    model = mlp()
    optimizer = sgd(model)
    with attach(model, optimizer, SMALL):
        groups = len(dist.distributed_c10d._world.pg_map)
        with pytest.raises(ConfigError) as caught:
            attach(model, optimizer if same_optimizer else sgd(model), SMALL)
        assert len(dist.distributed_c10d._world.pg_map) == groups
    return str(caught.value)


@pytest.mark.parametrize("same_optimizer", [True, False])
def test_a_model_that_is_attached_already_is_refused(ranks, same_optimizer):
    for message in ranks(attached_twice, same_optimizer):
        assert "attached" in message


# ---------------------------------------------------------------- ranks that differ


def differing(what):
    """Rank 1's model or arguments differ in ``what``."""
    odd = dist.get_rank() == 1
    layers = {name: nn.Linear(4, 4) for name in ("first", "second")}
    options = {"schedule": SMALL}
    if odd and what == "shape":
        layers["second"] = nn.Linear(4, 5)
    if odd and what == "number":
        layers["third"] = nn.Linear(4, 4)
    if odd and what == "order":
        layers = dict(reversed(layers.items()))
    if odd and what == "name":
        layers = {name.replace("second", "other"): layer for name, layer in layers.items()}
    if odd and what == "type":
        layers["second"].to(torch.float64)
    if odd and what == "frozen":
        layers["second"].requires_grad_(False)
    if odd and what == "schedule":
        options["schedule"] = "fifo"
    if odd and what == "compression":
        options["compression"] = "fp16"
    model = nn.ModuleDict(layers)
    model.add_module("fixed", nn.Linear(4, 5 if odd and what == "shape of a frozen one" else 4).requires_grad_(False))
    model.register_buffer("seen", torch.zeros(5 if odd and what == "shape of a buffer" else 4))
    if odd and what == "buffer":
        model.register_buffer("more", torch.zeros(3))
    groups = len(dist.distributed_c10d._world.pg_map)
    with pytest.raises(Disagreement) as caught:
        attach(model, sgd(model), **options)
    assert len(dist.distributed_c10d._world.pg_map) == groups
    return str(caught.value)


DIFFERENCES = {
    "shape": "second.weight",
    "number": "parameter",
    "order": "weight",
    "name": "second|other",
    "type": "second.weight",
    "frozen": "second.weight",
    "shape of a frozen one": "fixed.weight",
    "shape of a buffer": "buffer 'seen",
    "buffer": "buffers",
    "schedule": "schedule",
    "compression": "compression",
}


@pytest.mark.parametrize("what", DIFFERENCES)
def test_ranks_that_differ_are_told_in_what(ranks, what):
    for message in ranks(differing, what):
        assert any(name in message for name in DIFFERENCES[what].split("|")), message
        assert "rank" in message


def differing_freely():
    """Each rank keeps what it likes of what concerns nobody else."""
    odd = dist.get_rank() == 1
    model = mlp()
    model.register_buffer("seen", torch.zeros(5 if odd else 4))
    optimizer = sgd(model)
    with attach(model, optimizer, SMALL, warmup=WARMUP, broadcast_buffers=False, trace=odd) as attached:
        steps(model, optimizer)
        attached.synchronize()
        return bool(attached.begins)


def test_ranks_may_differ_in_what_is_not_shared(ranks):
    assert ranks(differing_freely) == [False, True]


# ---------------------------------------------------------------- the beginning


def begun(broadcast):
    """Parameters and buffers that differ from rank to rank, before and after attach."""
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    model[2].requires_grad_(False)
    model[1].running_mean.normal_()
    before = values(model)
    with attach(model, sgd(model), SMALL, broadcast_buffers=broadcast):
        return before, values(model)


def test_training_begins_with_rank_zeros_parameters_and_buffers(three):
    seen = three(begun, True)
    assert not torch.equal(seen[0][0][0], seen[1][0][0])
    for _, after in seen:
        assert all(torch.equal(a, b) for a, b in zip(after, seen[0][0], strict=True))


def unequal(side):
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH))
    optimizer = sgd(model)
    net = side.wrap(model, optimizer)
    for step in range(STEPS):
        loss = objective(net(batch(step)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss


def test_models_that_begin_differently_train_as_with_ddp(ranks):
    assert_same(ranks, unequal)


# ---------------------------------------------------------------- what it can tell


class Backwards(nn.Module):
    def __init__(self):
        super().__init__()
        self.late, self.early = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 16)
        self.middle = nn.Linear(16, WIDTH)

    def forward(self, x):
        return self.late(self.middle(self.early(x).tanh()).tanh())


def told():
    torch.manual_seed(0)
    model = Backwards()
    optimizer = sgd(model)
    with attach(model, optimizer, SMALL, warmup=WARMUP, trace=True) as attached:
        steps(model, optimizer, WARMUP)
        early = (attached.schedule, attached.workload, attached.cost, attached.bound, attached.steps, attached.log)
        steps(model, optimizer, STEPS, WARMUP)
        attached.synchronize()
        layers = [layer.name for layer in attached.workload.layers]
        sizes = {gradient.name: gradient.size for gradient in attached.workload.gradients}
        late = (str(attached.schedule), attached.cost, attached.bound, attached.steps, attached.log, attached.begins)
        lanes = {(span.lane, span.kind) for span in attached.timeline}
        sent = sum(span.size for span in attached.timeline if span.kind == "communication")
    return early, layers, sizes, late, lanes, sent


@pytest.mark.smoke
def test_what_was_observed_decided_and_done_can_be_read(ranks):
    for rank, (early, layers, sizes, late, lanes, sent) in enumerate(ranks(told)):
        assert early[:4] == (None, None, None, None)
        assert early[4:] == (0, ())
        assert layers == ["early", "middle", "late"]
        assert list(sizes) == [f"{name}.{kind}" for name in ("late", "early", "middle") for kind in ("weight", "bias")]
        assert sizes["middle.weight"] == 16 * WIDTH * 4
        schedule, cost, bound, begun, log, begins = late
        assert schedule.startswith(SMALL[:-1])  # knobs that it leaves open may follow
        assert cost.per_byte > 0
        assert bound is not None
        assert begun == STEPS
        assert len(begins) >= STEPS
        assert list(begins) == sorted(begins)
        whole = STEPS * sum(sizes.values())
        assert sum(decision.chunk.size for decision in log) == (0 if rank else whole)
        assert {("wire", "communication"), ("optimizer", "update"), ("gpu", "forward"), ("gpu", "backward")} <= lanes
        assert sent == whole


def remembered(clears):
    """Whether the buffer of the watched steps is gone once there is a schedule, and what .grad is around that."""
    model = mlp()
    optimizer = sgd(model)
    with attach(model, optimizer, SMALL, warmup=WARMUP) as attached:
        storages = [StorageWeakRef(flat.untyped_storage()) for flat in attached._warmup._gradients.flat]
        for step in range(WARMUP):
            if clears:
                optimizer.zero_grad()
            objective(model(batch(step))).backward()
            optimizer.step()
        before = [p.grad.clone() for p in model.parameters()]
        output = model(batch(WARMUP))
        after = [p.grad.clone() for p in model.parameters()]
        gone = [storage.expired() for storage in storages]
        objective(output).backward()
        optimizer.step()
        return attached.schedule is not None, gone, [torch.equal(a, b) for a, b in zip(before, after, strict=True)]


@pytest.mark.parametrize("clears", [True, False])
def test_the_buffer_of_the_watched_steps_is_freed_and_gradients_are_kept(ranks, clears):
    for scheduled, gone, same in ranks(remembered, clears):
        assert scheduled
        assert all(gone)
        assert all(same)


# ---------------------------------------------------------------- the end


def footprint(model, optimizer):
    """What may be registered on, or put into, a model, an optimizer and the classes of torch."""
    modules = {
        name: (type(module), {key: len(value) for key, value in vars(module).items() if key.endswith("hooks")})
        for name, module in model.named_modules()
    }
    plain = {
        name: sorted(key for key, value in vars(module).items() if callable(value) and not key.startswith("_"))
        for name, module in model.named_modules()
    }
    parameters = {
        name: (type(p), p.is_leaf, p.stride(), len(p._post_accumulate_grad_hooks or ()), len(p._backward_hooks or ()))
        for name, p in model.named_parameters()
    }
    hooks = {key: len(value) for key, value in vars(optimizer).items() if key.endswith("hooks")}
    own = sorted(key for key, value in vars(optimizer).items() if callable(value))
    own += [type(group["params"]) for group in optimizer.param_groups]
    classes = [dict(vars(c)) for c in (nn.Parameter, nn.Module, torch.Tensor, torch.optim.Optimizer, type(optimizer))]
    return [modules, plain, parameters, hooks, own, type(optimizer), classes, sys.getswitchinterval()]


def opened_and_closed(count, how):
    """Footprints before and after, threads after, and whether a model that was attached trains on like any other."""
    model = mlp()
    optimizer = sgd(model)
    before, threads = footprint(model, optimizer), set(threading.enumerate())
    if how == "with":
        with attach(model, optimizer, SMALL, warmup=WARMUP):
            steps(model, optimizer, count)
    else:
        attached = attach(model, optimizer, SMALL, warmup=WARMUP)
        steps(model, optimizer, count)
        attached.close()
        if how == "twice":
            attached.close()
    changed = [place for place, (a, b) in enumerate(zip(before, footprint(model, optimizer), strict=True)) if a != b]
    left = [thread.name for thread in set(threading.enumerate()) - threads]
    twin = copy.deepcopy(model)
    own = sgd(twin)
    own.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    steps(model, optimizer, 3)
    steps(twin, own, 3)
    return changed, left, [torch.equal(a, b) for a, b in zip(values(model), values(twin), strict=True)], values(model)


@pytest.mark.parametrize(
    ("count", "how"), [*((count, "close") for count in (0, 1, WARMUP, STEPS)), (STEPS, "twice"), (STEPS, "with")]
)
def test_close_leaves_nothing_behind_and_the_model_trains_on(ranks, count, how):
    seen = ranks(opened_and_closed, count, how)
    for changed, left, same, _ in seen:
        assert not changed
        assert not left
        assert all(same)
    assert not torch.equal(seen[0][3][0], seen[1][3][0])  # each rank alone


def interrupted_inside():
    model = mlp()
    optimizer = sgd(model)
    threads = set(threading.enumerate())
    # Who comes second may hear of the other's end before it comes to its own.
    with contextlib.suppress(ZeroDivisionError, PeerLost), attach(model, optimizer, SMALL, warmup=WARMUP):
        steps(model, optimizer, STEPS)
        objective(model(batch(STEPS))).backward()
        raise ZeroDivisionError
    left = [thread.name for thread in set(threading.enumerate()) - threads]
    model.zero_grad()
    steps(model, optimizer, 1)
    return left


def test_an_exception_leaves_the_context_without_waiting(ranks):
    assert ranks(interrupted_inside) == [[], []]


def broken_off(order):
    """On rank 0 the last part of what a schedule needs cannot be made."""
    if dist.get_rank() == 0:
        builder.GradientDispatcher = lambda *_: 1 // 0
    model = mlp()
    optimizer = sgd(model)
    threads = set(threading.enumerate())
    with (
        pytest.raises((ZeroDivisionError, PeerLost)) as caught,
        attach(model, optimizer, SMALL, transport=AllReduce(order)),
    ):
        steps(model, optimizer)
    return caught.type.__name__, [thread.name for thread in set(threading.enumerate()) - threads]


@pytest.mark.parametrize("order", ["coordinator", "replay"])
def test_a_schedule_that_cannot_begin_leaves_no_thread(job, order):
    assert job(2)(broken_off, order) == [("ZeroDivisionError", []), ("PeerLost", [])]


def attached_in_turn(first_goes_first):
    """Two models, attached one after the other; how long a thread may keep the interpreter in between."""
    intervals = [sys.getswitchinterval()]
    handles = [attach(model, sgd(model), SMALL) for model in (mlp(1), mlp(1))]
    for handle in handles if first_goes_first else handles[::-1]:
        intervals.append(sys.getswitchinterval())
        handle.close()
    return [*intervals, sys.getswitchinterval()]


@pytest.mark.parametrize("first_goes_first", [True, False])
def test_the_last_of_several_gives_the_interpreter_back(ranks, first_goes_first):
    for before, two, one, none in ranks(attached_in_turn, first_goes_first):
        assert two == one < before == none


def scheduler_made_inside():
    """A scheduler wraps the optimizer's step while it is attached; afterwards both still work."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attach(model, optimizer, SMALL, warmup=WARMUP):
        scheduler = lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        steps(model, optimizer)
    before = values(model)
    steps(model, optimizer, 1)
    scheduler.step()
    return [not torch.equal(a, b) for a, b in zip(before, values(model), strict=True)], optimizer.param_groups[0]["lr"]


def test_a_scheduler_made_under_way_outlives_it(ranks):
    for moved, rate in ranks(scheduler_made_inside):
        assert all(moved)
        assert rate == 0.05


def again_and_again(side):
    """The same model attached, closed and attached again."""
    model = mlp()
    optimizer = sgd(model)
    for attempt in range(3):
        net = side.wrap(model, optimizer)
        for step in range(6):
            loss = objective(net(batch(10 * attempt + step)))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield loss
        if isinstance(side, Attached):
            side.close()


def test_attached_again_after_close(ranks):
    assert_same(ranks, again_and_again)


def used_after_close():
    model = mlp()
    optimizer = sgd(model)
    attached = attach(model, optimizer, SMALL, warmup=WARMUP)
    steps(model, optimizer)
    attached.close()
    return attached.schedule is not None, attached.steps, attached.workload is not None, bool(attached.log)


def test_what_was_seen_can_be_read_after_close(ranks):
    assert ranks(used_after_close) == [(True, STEPS - WARMUP, True, True), (True, STEPS - WARMUP, True, False)]


def forgotten():
    """Neither model nor handle is kept alive by what closed."""
    model = mlp()
    optimizer = sgd(model)
    attached = attach(model, optimizer, SMALL, warmup=WARMUP)
    steps(model, optimizer)
    attached.close()
    gone = weakref.ref(attached), weakref.ref(model)
    del attached, model, optimizer
    gc.collect()
    return [reference() is None for reference in gone]


def test_nothing_is_kept_alive(ranks):
    assert ranks(forgotten) == [[True, True]] * 2


# ---------------------------------------------------------------- ends without close()

SCRIPT = """
import atexit, hashlib, os, sys, time
import torch
import torch.distributed as dist
from torch.distributed import destroy_process_group
from foretrain.plugins.torch import attach
from tests.plugins.torch.models import SMALL, batch, mlp, objective, sgd

def digest():
    data = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    sys.stdout.write(hashlib.sha256(data).hexdigest() + "\\n")
    sys.stdout.flush()

def late(gradient):
    if step == steps - 1 and dist.get_rank() == 1:
        time.sleep(0.5)

torch.set_num_threads(1)
dist.init_process_group("gloo")
steps, how = int(sys.argv[1]), sys.argv[2]
model = mlp()
optimizer = sgd(model)
atexit.register(digest)
attached = attach(model, optimizer, SMALL, warmup=2)
model[0].weight.register_hook(late)
for step in range(steps):
    optimizer.zero_grad()
    objective(model(batch(step))).backward()
    if how != "unfinished" or step < steps - 1:
        optimizer.step()
if how == "destroys":
    destroy_process_group()
"""


def launched(folder, *words):
    """What each rank of the script printed; torchrun and all ranks end with 0."""
    script = folder / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script), *words]
    environment = {**os.environ, **QUIET, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr[-4000:]
    assert "PeerLost" not in ran.stderr
    return ran.stdout.split()


def stock(count):
    """What the script prints, under DistributedDataParallel."""
    model = mlp()
    optimizer = sgd(model)
    net = DistributedDataParallel(model)
    for step in range(count):
        optimizer.zero_grad()
        objective(net(batch(step))).backward()
        optimizer.step()
    data = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    return hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize("how", ["ends", "destroys", "unfinished"])
def test_a_script_that_does_not_close_has_made_its_last_step(ranks, tmp_path, how):
    assert launched(tmp_path, "9", how) == ranks(stock, 8 if how == "unfinished" else 9)


def groups_gone(how):
    """What is left after destroy_process_group, and whether close() still works; each rank's parameters."""
    model = mlp()
    optimizer = sgd(model)
    unseen = dist.destroy_process_group
    group = dist.new_group([0, 1])
    threads = set(threading.enumerate())
    attached = attach(model, optimizer, SMALL, warmup=WARMUP, group=group)
    steps(model, optimizer)
    if how == "other":
        dist.destroy_process_group(dist.new_group([0, 1]))
        steps(model, optimizer, 2, STEPS)
        dist.destroy_process_group(group)
    elif how == "raising":
        with contextlib.suppress(ZeroDivisionError, PeerLost):
            try:
                objective(model(batch(STEPS))).backward()
                raise ZeroDivisionError
            finally:
                dist.destroy_process_group(group)
    else:
        (unseen if "unseen" in how else dist.destroy_process_group)(None if "all" in how else group)
    left = [thread.name for thread in set(threading.enumerate()) - threads]
    attached.close()
    return left, dist.destroy_process_group is unseen, [value.tolist() for value in values(model)]


@pytest.mark.parametrize("how", ["group", "all", "other", "raising", "unseen", "all unseen"])
def test_groups_that_are_destroyed_first(job, how):
    first, second = job(2)(groups_gone, how)
    for left, restored, _ in (first, second):
        assert (left == []) == ("unseen" not in how)
        assert restored
    if how != "raising":
        assert first[2] == second[2]
