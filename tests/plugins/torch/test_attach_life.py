"""attach refuses what it cannot schedule, begins alike on all ranks, reports, and leaves nothing behind."""

import contextlib
import copy
import gc
import hashlib
import sys
import threading
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler

from foretrain.comm.options import AllReduce, ParameterServer
from foretrain.errors import ConfigError, Disagreement, PeerLost
from foretrain.plugins.torch import attach, builder
from tests.examples.torchrun import ended
from tests.plugins.torch.models import (
    SMALL,
    STEPS,
    WARMUP,
    WIDTH,
    Attached,
    batch,
    loop,
    mlp,
    objective,
    pair,
    same_as_ddp,
    sgd,
    train,
)


def values(model):
    return [tensor.detach().clone() for tensor in [*model.parameters(), *model.buffers()]]


# ---------------------------------------------------------------- refusals


def test_without_a_process_group():
    model = mlp()
    with pytest.raises(ConfigError, match="init_process_group"):
        attach(model, sgd(model))


def model_with(change):
    model = mlp()
    changed = change(model) or model
    return changed, sgd(model)


def wrapped():
    return model_with(DistributedDataParallel)


def wrapped_inside():
    return model_with(lambda model: nn.Sequential(mlp(1), DistributedDataParallel(model)))


def sharded():
    from torch.distributed.fsdp import fully_shard

    return model_with(lambda model: fully_shard(model, mesh=dist.init_device_mesh("cpu", (dist.get_world_size(),))))


def frozen():
    model, optimizer = pair()
    return model.requires_grad_(False), optimizer


def foreign():
    return mlp(), sgd(mlp())


def none_at_all():
    return mlp(), []


def no_optimizer():
    model = mlp()
    return model, model.parameters()


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
    (complex_valued, {}, "'1.weight' is complex"),
    (without_elements, {}, "no parameter that requires a gradient"),
    (None, {"schedule": "bytescheduller"}, "bytescheduler"),
    (None, {"schedule": "p3(slize=1KiB)"}, "slice"),
    (None, {"compression": "fp8"}, "fp16"),
    (None, {"transport": "replay"}, "all_reduce"),
    (None, {"transport": "ps"}, "FORETRAIN_SERVERS: '' names no server"),
    (None, {"transport": AllReduce(backend="nccl")}, "is not the process group's, gloo"),
    (None, {"transport": ParameterServer("here")}, "addresses: 'here' is no address"),
    (None, {"timeouts": 60}, "Timeouts"),
    (None, {"warmup": 0}, "warmup"),
    (None, {"broadcast_buffers": "no"}, "broadcast_buffers"),
    (None, {"tune": True, "transport": AllReduce("replay")}, "fixed order"),
    (None, {"tune": True, "transport": ParameterServer("127.0.0.1:1", consistency="async")}, "bsp"),
    (None, {"tune": True, "transport": ParameterServer("127.0.0.1:1", elastic=True)}, "elastic"),
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


def test_wrong_models_and_arguments_are_refused(ranks):
    for make, options, expected in REFUSED:
        for message in ranks(refused, make, options):
            assert expected in message


def sparse_gradient():
    model = nn.Sequential(nn.Embedding(10, WIDTH, sparse=True), mlp(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attach(model, optimizer):
        with pytest.raises(ConfigError) as caught:
            model(torch.arange(8)).sum().backward()
        optimizer.zero_grad()
    return str(caught.value)


def test_a_sparse_gradient_is_refused_when_it_is_seen(ranks):
    for message in ranks(sparse_gradient):
        assert "sparse" in message


def attached_twice():
    model = mlp()
    with attach(model, sgd(model), SMALL):
        groups = len(dist.distributed_c10d._world.pg_map)
        with pytest.raises(ConfigError) as caught:
            attach(model, sgd(model), SMALL)
        assert len(dist.distributed_c10d._world.pg_map) == groups
    return str(caught.value)


def test_a_model_that_is_attached_already_is_refused(ranks):
    for message in ranks(attached_twice):
        assert "attached" in message


# ---------------------------------------------------------------- ranks that differ


def renamed(model):
    model.other = model.second
    del model.second


def swapped(model):
    first = model.first
    del model.first
    model.first = first


DIFFERENCES = {
    "shape": (lambda model: setattr(model, "second", nn.Linear(4, 5)), {}, "second.weight"),
    "number": (lambda model: model.add_module("third", nn.Linear(4, 4)), {}, "parameter"),
    "order": (swapped, {}, "weight"),
    "name": (renamed, {}, "second|other"),
    "type": (lambda model: model.second.to(torch.float64), {}, "second.weight"),
    "frozen": (lambda model: model.second.requires_grad_(False), {}, "second.weight"),
    "shape of a frozen one": (lambda model: setattr(model, "fixed", nn.Linear(4, 5)), {}, "fixed.weight"),
    "shape of a buffer": (lambda model: model.register_buffer("seen", torch.zeros(5)), {}, "buffer 'seen"),
    "buffer": (lambda model: model.register_buffer("more", torch.zeros(3)), {}, "buffers"),
    "schedule": (lambda model: None, {"schedule": "fifo"}, "schedule"),
    "compression": (lambda model: None, {"compression": "fp16"}, "compression"),
}
"""What rank 1 does to its model, and its arguments; names of which the message has one."""


def differing(what):
    model = nn.Module()
    model.fixed = nn.Linear(4, 4).requires_grad_(False)
    model.first, model.second = nn.Linear(4, 4), nn.Linear(4, 4)
    model.register_buffer("seen", torch.zeros(4))
    change, options, _ = DIFFERENCES[what]
    if dist.get_rank() == 1:
        change(model)
    groups = len(dist.distributed_c10d._world.pg_map)
    with pytest.raises(Disagreement) as caught:
        attach(model, sgd(model), **{"schedule": SMALL} | (options if dist.get_rank() == 1 else {}))
    assert len(dist.distributed_c10d._world.pg_map) == groups
    return str(caught.value)


def test_ranks_that_differ_are_told_in_what(ranks):
    for what, (_, _, names) in DIFFERENCES.items():
        for message in ranks(differing, what):
            assert any(name in message for name in names.split("|")), (what, message)
            assert "rank" in message


def differing_freely():
    """Each rank keeps what it likes of what concerns nobody else."""
    odd = dist.get_rank() == 1
    model = mlp()
    model.register_buffer("seen", torch.zeros(5 if odd else 4))
    optimizer = sgd(model)
    with attach(model, optimizer, SMALL, warmup=WARMUP, broadcast_buffers=False, trace=odd) as attached:
        train(model, optimizer)
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


@same_as_ddp()
def test_models_that_begin_differently_train_as_with_ddp(side):
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH))
    yield from loop(side, model)


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
        train(model, optimizer, WARMUP)
        early = (attached.schedule, attached.workload, attached.cost, attached.bound, attached.steps, attached.log)
        train(model, optimizer, STEPS, WARMUP)
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


def remembered():
    """Whether the buffer of the observed steps is gone once there is a schedule, and whether .grad stays."""
    model, optimizer = pair()
    with attach(model, optimizer, SMALL, warmup=WARMUP) as attached:
        storages = [StorageWeakRef(flat.untyped_storage()) for flat in attached._warmup._gradients.flat]
        for step in range(WARMUP):
            objective(model(batch(step))).backward()
            optimizer.step()
        before = [p.grad.clone() for p in model.parameters()]
        output = model(batch(WARMUP))
        after = [p.grad.clone() for p in model.parameters()]
        gone = [storage.expired() for storage in storages]
        objective(output).backward()
        optimizer.step()
        return attached.schedule is not None, gone, [torch.equal(a, b) for a, b in zip(before, after, strict=True)]


def test_the_buffer_of_the_observed_steps_is_freed_and_gradients_are_kept(ranks):
    for scheduled, gone, same in ranks(remembered):
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


def threads_beside(before):
    return [thread.name for thread in set(threading.enumerate()) - before]


def opened_and_closed(count, how):
    """Footprints before and after, threads after, and whether a model that was attached trains on like any other."""
    model, optimizer = pair()
    before, threads = footprint(model, optimizer), set(threading.enumerate())
    with attach(model, optimizer, SMALL, warmup=WARMUP) as attached:
        train(model, optimizer, count)
        if how == "twice":
            attached.close()
    changed = [place for place, (a, b) in enumerate(zip(before, footprint(model, optimizer), strict=True)) if a != b]
    left = threads_beside(threads)
    twin = copy.deepcopy(model)
    own = sgd(twin)
    own.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(model, optimizer, 3)
    train(twin, own, 3)
    return changed, left, [torch.equal(a, b) for a, b in zip(values(model), values(twin), strict=True)], values(model)


@pytest.mark.parametrize(("count", "how"), [(0, "with"), (WARMUP, "with"), (STEPS, "twice")])
def test_close_leaves_nothing_behind_and_the_model_trains_on(ranks, count, how):
    seen = ranks(opened_and_closed, count, how)
    for changed, left, same, _ in seen:
        assert not changed
        assert not left
        assert all(same)
    assert not torch.equal(seen[0][3][0], seen[1][3][0])  # each rank alone


def interrupted_inside():
    model, optimizer = pair()
    threads = set(threading.enumerate())
    # Who comes second may hear of the other's end before it comes to its own.
    with contextlib.suppress(ZeroDivisionError, PeerLost), attach(model, optimizer, SMALL, warmup=WARMUP):
        train(model, optimizer, STEPS)
        objective(model(batch(STEPS))).backward()
        raise ZeroDivisionError
    left = threads_beside(threads)
    model.zero_grad()
    train(model, optimizer, 1)
    return left


def test_an_exception_leaves_the_context_without_waiting(ranks):
    assert ranks(interrupted_inside) == [[], []]


def broken_off(order):
    """On rank 0 the last part of what a schedule needs cannot be made."""
    if dist.get_rank() == 0:
        builder.GradientDispatcher = lambda *_: 1 // 0
    model, optimizer = pair()
    threads = set(threading.enumerate())
    with (
        pytest.raises((ZeroDivisionError, PeerLost)) as caught,
        attach(model, optimizer, SMALL, transport=AllReduce(order)),
    ):
        train(model, optimizer)
    return caught.type.__name__, threads_beside(threads)


@pytest.mark.parametrize("order", ["coordinator", "replay"])
def test_a_schedule_that_cannot_begin_leaves_no_thread(job, order):
    assert job(2)(broken_off, order) == [("ZeroDivisionError", []), ("PeerLost", [])]


def attached_in_turn():
    """Two models, attached one after the other; how long a thread may keep the interpreter in between."""
    intervals = [sys.getswitchinterval()]
    handles = [attach(model, sgd(model), SMALL) for model in (mlp(1), mlp(1))]
    for handle in handles:
        intervals.append(sys.getswitchinterval())
        handle.close()
    return [*intervals, sys.getswitchinterval()]


def test_the_last_of_several_restores_the_switch_interval(ranks):
    for before, two, one, none in ranks(attached_in_turn):
        assert two == one < before == none


def scheduler_made_inside():
    """A scheduler wraps the optimizer's step while it is attached; afterwards both still work."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attach(model, optimizer, SMALL, warmup=WARMUP):
        scheduler = lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        train(model, optimizer)
    before = values(model)
    train(model, optimizer, 1)
    scheduler.step()
    return [not torch.equal(a, b) for a, b in zip(before, values(model), strict=True)], optimizer.param_groups[0]["lr"]


def test_a_scheduler_made_under_way_outlives_it(ranks):
    for moved, rate in ranks(scheduler_made_inside):
        assert all(moved)
        assert rate == 0.05


@same_as_ddp()
def test_attached_again_after_close(side):
    """The same model attached, closed and attached again."""
    model, optimizer = pair()
    for _ in range(3):
        yield from loop(side, model, optimizer, steps=6)
        if isinstance(side, Attached):
            side.close()


def closed():
    """What was seen can be read; neither model nor handle is kept alive."""
    model, optimizer = pair()
    attached = attach(model, optimizer, SMALL, warmup=WARMUP)
    train(model, optimizer)
    attached.close()
    seen = attached.schedule is not None, attached.steps, attached.workload is not None, bool(attached.log)
    references = weakref.ref(attached), weakref.ref(model)
    del attached, model, optimizer
    gc.collect()
    return seen, [reference() is None for reference in references]


def test_after_close_results_can_be_read_and_nothing_is_kept_alive(ranks):
    for rank, (seen, gone) in enumerate(ranks(closed)):
        assert seen == (True, STEPS - WARMUP, True, rank == 0)
        assert gone == [True, True]


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


def stock(count):
    """What the script prints, under DistributedDataParallel."""
    model = mlp()
    train(DistributedDataParallel(model), sgd(model), count)
    data = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    return hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize("how", ["ends", "destroys", "unfinished"])
def test_a_script_that_does_not_close_has_made_its_last_step(ranks, tmp_path, how):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    told = ended(script, "9", how)
    assert told.stdout.split() == ranks(stock, 8 if how == "unfinished" else 9)
    assert "PeerLost" not in told.stderr


def groups_gone(how):
    """What is left after destroy_process_group, and whether close() still works; each rank's parameters."""
    model, optimizer = pair()
    unseen = dist.destroy_process_group
    group = dist.new_group([0, 1])
    threads = set(threading.enumerate())
    attached = attach(model, optimizer, SMALL, warmup=WARMUP, group=group)
    train(model, optimizer)
    if how == "other":
        other = dist.new_group([0, 1])
        dist.barrier(other)  # a rank that destroys it breaks the connections that others are still making
        dist.destroy_process_group(other)
        train(model, optimizer, 2, STEPS)
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
    left = threads_beside(threads)
    attached.close()
    return left, dist.destroy_process_group is unseen, [value.tolist() for value in values(model)]


@pytest.mark.parametrize("how", ["group", "all", "other", "raising", "all unseen"])
def test_groups_that_are_destroyed_first(job, how):
    first, second = job(2)(groups_gone, how)
    for left, restored, _ in (first, second):
        assert (left == []) == ("unseen" not in how)
        assert restored
    if how != "raising":
        assert first[2] == second[2]
