"""Shards that run optimizers, against PyTorch's on whole tensors, in every mode and any order of pushes."""

import subprocess
import sys
from itertools import pairwise

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foretrain.comm.ps.consistency import encode_groups
from foretrain.comm.ps.frames import FrameKind, Header, Malformed
from foretrain.comm.ps.placement import Declaration, Declared, Optimized, Placement
from foretrain.comm.ps.server.shard import mode
from foretrain.comm.ps.server.snapshots import copied, packed, read
from foretrain.errors import Disagreement, ForetrainError
from foretrain.plugins.torch.ps.server import make_optimizer_shard
from foretrain.plugins.torch.ps.server.optimizer_shard import OptimizerShard
from foretrain.plugins.torch.ps.server.parameter_store import PartState, contents, decode, encode, from_plain, to_plain

COUNT = 64
LIMIT = 128
"""Two parts of 32 elements."""
KINDS = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01},
    "AdamW": {"lr": 0.01, "weight_decay": 0.1},
    "NAdam": {"lr": 0.01},
    "ASGD": {"lr": 0.01},
    "Adagrad": {"lr": 0.1},
    "Rprop": {"lr": 0.01, "etas": (0.5, 1.2)},
}


class Job:
    """A shard with one tensor, seeded, and what its optimizer would make of the whole."""

    def __init__(self, workers, name="SGD", consistency="bsp", lost=(), dtype="float32", kept="float32", **options):
        self.workers, self.options = workers, options or KINDS[name]
        width = np.dtype(dtype).itemsize
        tasks = (Declared("layer", COUNT * width, dtype, 0),)
        optimized = Optimized((name,), (0,), (kept,), consistency)
        what = Declaration(tasks, workers, limit=LIMIT * width // 4, optimized=optimized)
        self.parts = Placement(what, 1).parts
        self.shard = mode(Declaration.decode(what.encode()), self.parts, workers, lost, False, make_optimizer_shard)
        assert isinstance(self.shard, OptimizerShard)
        generator = torch.Generator().manual_seed(0)
        self.whole = torch.nn.Parameter(torch.randn(COUNT, generator=generator).to(getattr(torch, kept)))
        self.optimizer = getattr(torch.optim, name)([self.whole], **self.options)
        self.width, self.dtype = width, dtype
        self.seed()
        for worker in range(workers):
            self.rule(worker, 0)

    def seed(self):
        state = self.optimizer.state.get(self.whole, {})
        for part in self.parts:
            place = slice(part.offset // self.width, (part.offset + part.size) // self.width)
            own = {name: value if value.dim() == 0 else value[place] for name, value in state.items()}
            frames = encode(contents(self.whole.detach()[place], own))
            for number, frame in enumerate(frames):
                header = Header(FrameKind.INIT, part=part.number, step=number, offset=len(frames), size=len(frame))
                answers = list(self.shard.answer_message(0, header, memoryview(frame)))
                assert bool(answers) == (number == len(frames) - 1)

    def rule(self, worker, step, **changes):
        groups = [{**self.options, **changes}]
        assert not list(
            self.shard.answer_message(worker, Header(FrameKind.RULE, step=step), memoryview(encode_groups(groups)))
        )

    def push(self, worker, part, step, gradient, start=0, end=None, **flags):
        """Elements ``[start, end)`` of a part's gradient; ``gradient`` is of the whole tensor."""
        here = self.parts[part]
        end = here.size // self.width if end is None else end
        low = here.offset // self.width
        data = None if gradient is None else memoryview(gradient[low + start : low + end].numpy().tobytes())
        return self.shard.push(worker, part, step, start * self.width, (end - start) * self.width, data, **flags)

    def step(self, gradient, **changes):
        """What the optimizer makes of it on the whole tensor."""
        self.optimizer.param_groups[0].update(changes)
        self.whole.grad = gradient
        self.optimizer.step()

    def values(self, deliveries, worker):
        """What ``worker`` was told, by part and in order: elements."""
        return {
            (value.part, value.start): None
            if value.data is None
            else torch.frombuffer(bytearray(value.data), dtype=self.whole.dtype)
            for target, value in deliveries
            if target == worker and value.data is not None
        }

    def expected(self, part):
        here = self.parts[part]
        return self.whole.detach()[here.offset // self.width : (here.offset + here.size) // self.width]


def gradients(seed, dtype=torch.float32):
    return torch.randn(COUNT, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
@pytest.mark.parametrize("name", KINDS)
@given(data=st.data())
@settings(max_examples=8)
def test_bsp_is_the_optimizer_on_the_sum(name, data):
    workers = data.draw(st.integers(1, 3))
    job = Job(workers, name)
    for step in range(3):
        if data.draw(st.booleans()):
            job.rule(0, step, lr=0.3)
            job.optimizer.param_groups[0]["lr"] = 0.3
            job.options = {**job.options, "lr": 0.3}
        pushed = [gradients(10 * step + worker) for worker in range(workers)]
        left = [
            (worker, part, low, high)
            for worker in range(workers)
            for part in range(2)
            for low, high in pairwise(sorted({0, 32, *data.draw(st.lists(st.integers(1, 31), max_size=2))}))
        ]
        told = torch.full((workers, COUNT), torch.nan)
        for worker, part, low, high in data.draw(st.permutations(left)):
            for _ in range(data.draw(st.integers(1, 2))):  # what is said twice counts once
                deliveries = job.push(worker, part, step, pushed[worker], low, high)
                for each in range(workers):
                    for (where, start), values in job.values(deliveries, each).items():
                        low_there = 32 * where + start // 4
                        told[each, low_there : low_there + len(values)] = values
        total = pushed[0].clone()
        for other in pushed[1:]:
            total += other
        job.step(total)
        for each in told:
            assert torch.equal(each, job.whole.detach())


def test_a_part_is_back_before_the_rest_of_its_tensor():
    job = Job(2)
    assert job.push(0, 0, 0, gradients(1)) == []
    assert {worker for worker, _ in job.push(1, 0, 0, gradients(2))} == {0, 1}


def test_what_nobody_has_a_gradient_for_stays():
    job = Job(2)
    job.push(0, 0, 0, None)
    deliveries = job.push(1, 0, 0, None)
    assert [(worker, value.data) for worker, value in deliveries] == [(0, None), (1, None)]
    assert [value.data for _, value in job.push(1, 0, 0, None)] == [None]
    job.push(0, 0, 1, None)
    found = job.values(job.push(1, 0, 1, gradients(3)), 0)
    job.step(gradients(3))
    assert torch.equal(found[0, 0], job.expected(0))


def test_a_narrow_gradient_updates_wide_parameters():
    job = Job(1, dtype="float16")
    narrow = gradients(4, torch.float16)
    (delivery,) = job.push(0, 0, 0, narrow)
    job.step(narrow.float())
    assert (delivery.value.start, delivery.value.end, len(delivery.value.data)) == (0, 64, 128)
    assert torch.equal(job.values([delivery], 0)[0, 0], job.expected(0))


def test_what_is_pushed_again_is_answered_again_and_counts_once():
    job = Job(2)
    for worker in range(2):
        deliveries = job.push(worker, 0, 0, gradients(worker))
    first = deliveries[0].value.data
    before = bytes(first)
    again = job.push(1, 0, 0, gradients(1), 8, 16)
    assert [(worker, value.start, value.end) for worker, value in again] == [(1, 32, 64)]
    assert bytes(again[0].value.data) == before[32:64]
    job.push(0, 0, 1, gradients(2))
    assert job.push(0, 0, 0, gradients(0)) == []
    assert bytes(job.push(1, 0, 0, gradients(1))[0].value.data) == before
    job.push(1, 0, 1, gradients(3))
    assert bytes(first) == before  # what is being sent is never written


def test_what_is_held_is_sent_when_it_is_pulled():
    job = Job(2)
    assert job.push(0, 0, 0, gradients(0), held=True) == []
    assert job.shard.pull(0, 0, 0, 0, 16) == []
    assert [(w, v.start, v.end) for w, v in job.push(1, 0, 0, gradients(1))] == [(0, 0, 16), (1, 0, 128)]
    assert [(w, v.start, v.end) for w, v in job.shard.pull(0, 0, 0, 16, 32)] == [(0, 16, 48)]


def test_a_lost_worker_counts_no_more():
    job = Job(3)
    job.push(0, 0, 0, gradients(0))
    job.push(2, 0, 0, gradients(5), 0, 8)
    job.push(1, 0, 0, gradients(1))
    assert job.shard.waiting() == ["round 0: part of task 'layer' waits for worker 2 (96 bytes)"]
    freed = job.values(job.shard.remove_worker(2), 0)
    job.step(1.5 * (gradients(0) + gradients(1)))
    torch.testing.assert_close(freed[0, 0], job.expected(0))
    # Whose hyperparameters count if rank 0 is lost: those of the lowest that is left.
    job.rule(1, 1, lr=0.5)
    job.push(1, 0, 1, gradients(3))
    found = job.values(job.shard.remove_worker(0), 1)
    job.step(3 * gradients(3), lr=0.5)
    torch.testing.assert_close(found[0, 0], job.expected(0))


def test_hyperparameters_apply_to_their_round_in_each_workers_count():
    job = Job(2, "SGD", "async", lr=1.0)
    before = job.expected(0).clone()
    ones = torch.ones(COUNT)
    job.rule(0, 2, lr=0.25)
    job.rule(1, 1, lr=0.5)
    for worker, step, rate in ((0, 0, 1.0), (1, 0, 1.0), (0, 1, 1.0), (1, 1, 0.5), (0, 2, 0.25)):
        found = job.values(job.push(worker, 0, step, ones), worker)[0, 0]
        torch.testing.assert_close(found, before - rate)
        before = found.clone()


@given(st.data())
@settings(max_examples=30)
def test_asynchronously_each_push_is_a_step_and_goes_back_to_its_worker_alone(data):
    job = Job(2, "SGD", "async")
    # Momentum is per element: an optimizer for each part.
    parts = [torch.nn.Parameter(part.clone()) for part in job.whole.detach().split(32)]
    optimizers = [torch.optim.SGD([part], **job.options) for part in parts]
    steps = [[0, 0], [0, 0]]
    for turn in range(8):
        worker, part = data.draw(st.integers(0, 1)), data.draw(st.integers(0, 1))
        step = steps[worker][part]
        for _ in range(2):  # a repeated push counts once
            assert job.push(worker, part, step, gradients(turn), 0, 20) == []
        deliveries = job.push(worker, part, step, gradients(turn), 20)
        assert [target for target, _ in deliveries] == [worker]
        steps[worker][part] += 1
        parts[part].grad = gradients(turn)[32 * part : 32 * part + 32]
        optimizers[part].step()
        torch.testing.assert_close(job.values(deliveries, worker)[part, 0], parts[part].detach())


def test_asynchronously_who_has_no_gradient_still_gets_what_others_have_made():
    job = Job(2, "SGD", "async", lr=1.0)
    job.push(0, 0, 0, torch.ones(COUNT))
    found = job.values(job.push(1, 0, 0, None), 1)
    job.step(torch.ones(COUNT))
    assert torch.equal(found[0, 0], job.expected(0))


@given(st.data())
@settings(max_examples=20)
def test_under_ssp_nobody_is_more_than_the_bound_ahead_and_nobody_waits_for_ever(data):
    workers, bound = data.draw(st.integers(2, 4)), data.draw(st.integers(0, 3))
    job = Job(workers, "SGD", f"ssp({bound})", lr=0.01)
    step = [0] * workers
    """Under way; a worker's step is over when both parts are back."""
    due = [{0, 1} for _ in range(workers)]
    out: list[set[int]] = [set() for _ in range(workers)]
    present = set(range(workers))

    def hear(deliveries):
        for worker, value in deliveries:
            assert value.step == step[worker]
            out[worker].discard(value.part)
            if not out[worker] and not due[worker]:
                step[worker] += 1
                due[worker] = {0, 1}

    for _ in range(40):
        able = [worker for worker in sorted(present) if due[worker]]
        # There is always one who can go on: the slowest never waits.
        assert able
        worker = data.draw(st.sampled_from(able))
        part = data.draw(st.sampled_from(sorted(due[worker])))
        due[worker].discard(part)
        out[worker].add(part)
        hear(job.push(worker, part, step[worker], gradients(worker)))
        if len(present) > 1 and data.draw(st.integers(0, 15)) == 0:
            gone = data.draw(st.sampled_from(sorted(present)))
            present.discard(gone)
            hear(job.shard.worker_closed(gone) if data.draw(st.booleans()) else job.shard.remove_worker(gone))
        slowest = min(step[worker] for worker in present)
        assert all(step[worker] - slowest <= bound + 1 for worker in present)


def test_who_waits_under_ssp_is_said():
    job = Job(2, consistency="ssp(0)")
    assert job.push(0, 0, 0, gradients(0)) == []
    assert job.shard.waiting() == ["step 0 of worker 0: task 'layer' waits for worker 1"]
    assert sorted(worker for worker, _ in job.push(1, 0, 0, gradients(1))) == [0, 1]


@pytest.mark.parametrize(("name", "consistency"), [("AdamW", "bsp"), ("SGD", "async"), ("ASGD", "ssp(1)")])
def test_a_shard_goes_on_from_its_state_as_if_nothing_had_been(name, consistency):
    def exchange(job, steps):
        found = []
        for step in steps:
            for worker in range(2):
                for part in range(2):
                    found += [
                        bytes(value.data) for _, value in job.push(worker, part, step, gradients(9 * step + worker))
                    ]
        return found

    one, other = Job(2, name, consistency), Job(2, name, consistency)
    exchange(one, range(3))
    one.rule(1, 3, lr=0.7)
    one.push(0, 1, 3, gradients(27), 0, 8)  # on its way: is pushed again
    state = copied(one.shard.state())
    held = from_plain(state["masters"][0]["parameter"])
    other.shard.restore(state)
    found, expected = exchange(other, range(3, 5)), exchange(one, range(3, 5))
    assert found == expected
    assert torch.equal(from_plain(state["masters"][0]["parameter"]), held)
    assert other.shard.state().keys() == state.keys()
    assert [bytes(v.data) for _, v in other.push(0, 0, 4, gradients(36))] == expected[-4:-3] or consistency != "bsp"


def test_a_state_reads_as_frames_what_was_written():
    job = Job(1, "AdamW")
    job.push(0, 0, 0, gradients(0))
    answers = list(job.shard.answer_message(0, Header(FrameKind.GET_STATE, part=0), memoryview(b"")))
    assert [(header.kind, header.step, header.offset, header.size) for header, _ in answers] == [
        (FrameKind.STATE, number, 4, len(frame)) for number, (_, frame) in enumerate(answers)
    ]
    found = decode([frame for _, frame in answers])
    job.step(gradients(0))
    assert torch.equal(found.parameter, job.expected(0))
    own = job.optimizer.state[job.whole]
    assert list(found.state) == ["step", "exp_avg", "exp_avg_sq"] or set(found.state) == set(own)
    assert found.state["step"] == own["step"]
    assert found.state["step"].dtype == own["step"].dtype
    assert torch.equal(found.state["exp_avg"], own["exp_avg"][:32])


def test_what_makes_no_sense():
    job = Job(2)
    zeros = torch.zeros(COUNT)
    for arguments, reason in [
        ((0, 9, 0, 0, 4, None), "part"),
        ((0, 0, 0, 2, 4, None), "range"),
        ((0, 0, 0, 0, 4, memoryview(b"12")), "size"),
        ((0, 0, 1, 0, 4, None), "round"),
    ]:
        with pytest.raises(Malformed) as error:
            job.shard.push(*arguments)
        assert error.value.reason == reason
    with pytest.raises(Malformed, match="a pull of 4 bytes"):
        job.shard.pull(0, 0, 3, 0, 4)
    with pytest.raises(Disagreement, match="again before step"):
        job.push(0, 0, 0, zeros, again=True)
    for header, payload, reason in [
        (Header(FrameKind.RULE), b"{", "rule"),
        (Header(FrameKind.RULE), b"[]", "rule"),
        (Header(FrameKind.RULE), b'[{"lr": "os.system"}]', "rule"),
        (Header(FrameKind.INIT, part=0, step=1, offset=3), b"", "seed"),
        (Header(FrameKind.INIT, part=0, step=0, offset=1), b"no", "state"),
        (Header(FrameKind.INIT, part=5, step=0, offset=2), b"", "seed"),
        (Header(FrameKind.GET_STATE, part=5), b"", "fetch"),
    ]:
        with pytest.raises(Malformed) as error:
            list(job.shard.answer_message(0, header, memoryview(payload)))
        assert error.value.reason == reason
    with pytest.raises(Malformed, match="by worker 1"):
        list(job.shard.answer_message(1, Header(FrameKind.INIT, part=0, step=0, offset=2), memoryview(b"")))
    short = encode(PartState(torch.zeros(3), {}))
    list(job.shard.answer_message(0, Header(FrameKind.INIT, part=0, step=0, offset=2), memoryview(short[0])))
    with pytest.raises(Malformed, match=r"3 torch.float32 for 32"):
        list(job.shard.answer_message(0, Header(FrameKind.INIT, part=0, step=1, offset=2), memoryview(short[1])))


def test_an_optimizer_that_fails_is_named():
    job = Job(1, "AdamW")
    job.rule(0, 0, betas=3)
    with pytest.raises(ForetrainError, match="the optimizer of 'layer' failed on its server"):
        job.push(0, 0, 0, gradients(0))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"classes": ("LBFGS",)}, "an optimizer 'LBFGS', which is none that servers run"),
        ({"classes": ("load",)}, "'load'"),
        ({"group_of": (1,)}, "a parameter group that is none of 1"),
        ({"group_of": ()}, "optimizers for 0 of 1 tasks"),
        ({"consistency": "ssp"}, "consistency: 'ssp' is unknown"),
    ],
)
def test_only_what_is_known_is_looked_up(change, said):
    optimized = Optimized(("SGD",), (0,), ("float32",))
    what = Declaration((Declared("layer", 4, "float32", 0),), 1, optimized=msgspec.structs.replace(optimized, **change))
    with pytest.raises(Malformed, match=said):
        Declaration.decode(what.encode())


def test_a_tensor_survives_a_snapshot(tmp_path):
    path = tmp_path / "state"
    tensors = [torch.randn(3, 4).to(kind).t() for kind in (torch.float32, torch.bfloat16)]
    tensors += [torch.zeros(0, 2), torch.tensor(5)]
    path.write_bytes(b"".join(packed({"a": [to_plain(tensor) for tensor in tensors]})))
    for one, other in zip(read(path)["a"], tensors, strict=True):
        assert from_plain(one).dtype == other.dtype
        assert torch.equal(from_plain(one), other)


SERVING = """
import sys
import torch
from foretrain.plugins.torch.ps.server import prepare

prepare()
one = torch.nn.Parameter(torch.ones(3))
one.grad = torch.ones(3)
torch.optim.Adam([one], foreach=False).step()
print("torch._dynamo.trace_rules" in sys.modules)
print(torch.compile(lambda x: x + 1, backend="eager")(torch.zeros(1)).item())
print("torch._dynamo.trace_rules" in sys.modules)
"""


@pytest.mark.process
def test_a_server_imports_no_compiler_unless_something_is_compiled():
    ended = subprocess.run([sys.executable, "-c", SERVING], capture_output=True, text=True, check=True)
    assert ended.stdout.split() == ["False", "1.0", "True"]
