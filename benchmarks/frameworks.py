"""What scheduling gains under PyTorch, Keras, JAX and MXNet: the same paced model and the same links, side by side.

Twelve layers of equal time, each with half as many bytes again as the one before, as the blocks of ResNet-50 nearly
have: the first has 0.4 % of them, the last three 70 %. Their computation sleeps, by the clock of an accelerator that
works while its host does something else (foretrain.lab.paced). Two hosts, which are network namespaces of this machine;
communication takes as long as computation. Cases of a framework are interleaved in the same processes. Needs root; a
framework is left out where it is not installed, and a line says so. MXNet is in an environment of its own, which
tools/mxnet.py makes.

alone           nothing is exchanged
after           all gradients are exchanged after the backward pass, as an optimizer without overlap does
fifo            each gradient as it comes, first in, first out, with the global barrier
bytescheduler   partitions and priority, across the barrier; partition and credit from the simulated step
tuned           the same, and both searched on during training, before it is measured
prophet         blocks that the profile predicts, across the barrier

All sum by foretrain's ring; "after" under PyTorch by gloo, as DDP on CPUs does.

T* is the optimum of the fastest step alone, on the network at the best rate that a job measured; "forecast" is the
simulator's, of that step on the network as this job measured it. "of linear" is the rate beside that of computation
alone: 1 where N hosts train N times as fast as one.

--quick has one place, and no prophet and no search. --full has all cases, longer steps, other rates and four hosts.
Where PyTorch is, its ranks also time sums of 1 MiB by our ring and by gloo, on the same links.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from measure import finish, options, spread

if TYPE_CHECKING:
    from foretrain.workload import Workload

LAYERS = 12
GROWTH = 1.5
"""Bytes of a layer over those of the layer before it."""
CASES = ("alone", "after", "fifo", "bytescheduler", "prophet", "tuned")
EXCHANGED = ("fifo", "bytescheduler", "prophet", "tuned")
SEARCHED = 120
"""Steps of search, before anything is measured, where knobs are tuned."""
PAPER = 2.96
"""ByteScheduler's largest gain over a vanilla framework (SOSP'19, §6: up to 196 %), MXNet on a parameter server."""
WHY = "with all-reduce, and as much communication as computation, no schedule more than halves a step"
"""Why a framework gains less than the paper's largest gain: that is of 16 GPUs whose servers are the bottleneck, over a
baseline that pushes whole tensors before it pulls any."""
PACKAGES = {"torch": "torch", "keras": "tensorflow", "jax": "jax", "mxnet": "mxnet"}
MXNET = Path(sys.prefix, "mxnet", "bin", "python")
DROPPED = 1
"""Steps at the beginning of each block that are not samples: the case before has left the link and the caches."""
OBSERVED = 6
WAITED = 150e-6
"""Seconds from which on the host has waited for a sum, and not only looked for it."""
MIB = 1 << 20
_WORK = "FORETRAIN_FRAMEWORKS_BENCHMARK"


@dataclass(frozen=True, slots=True)
class Setting:
    """Hosts, rate of their links in bit/s, seconds of computation, how often each case is measured, and the cases."""

    hosts: int
    rate: float
    compute: float
    blocks: int
    steps: int
    cases: tuple[str, ...] = CASES

    @property
    def sizes(self) -> list[int]:
        """Elements of each layer: in all as many bytes as take as long as the computation."""
        moved = 2 * (self.hosts - 1) / self.hosts
        total = self.compute * self.rate / 8 / moved / 4
        shares = [GROWTH**k for k in range(LAYERS)]
        return [int(total * share / sum(shares)) for share in shares]

    def workload(self, stretch: float = 1.0) -> Workload:
        """The step, whose computation takes ``stretch`` times as long; a backward pass is two forward passes."""
        from foretrain.units import SECOND
        from foretrain.workload import Gradient, Layer, Workload

        unit = round(stretch * self.compute / LAYERS / 3 * SECOND)
        layers = tuple(Layer(f"layer{k}", unit, 2 * unit) for k in range(LAYERS))
        gradients = tuple(
            Gradient(f"layer{k}.weight", 4 * size, k, 2 * unit * (LAYERS - k)) for k, size in enumerate(self.sizes)
        )
        return Workload("paced", 1, layers, gradients)

    def __str__(self) -> str:
        return f"{self.hosts} hosts, {self.rate / 1e9:g} Gb/s, {1e3 * self.compute:g} ms of computation"


# In each rank: a case is a function that trains some steps and returns the moments at which they ended, and what
# exchanges its gradients, if it is one of `EXCHANGED`.

Case = Callable[[int], list[float]]
Cases = Iterator[tuple[str, Case, Any]]


class Accelerator:
    """What computes a rank's layers: forward, then backward, and again, called by any thread.

    A wait for a sum delays what is computed next; other work of the host does not. See foretrain.lab.paced.
    """

    def __init__(self, setting: Setting) -> None:
        from foretrain.comm.session import CommTask
        from foretrain.lab.paced import AcceleratorClock
        from foretrain.plugins.gradient_stream import GradientStream

        self.clock, self.workload = AcceleratorClock(), setting.workload()
        self._computed, self._waited = 0, False
        self._ended, self._landed = 0.0, dict[int, float]()
        wait, read = CommTask.wait, GradientStream.read

        def timed(task: CommTask) -> Any:
            began = time.perf_counter()
            found = wait(task)
            self._waited |= time.perf_counter() - began > WAITED
            return found

        def landed(stream: GradientStream, index: int) -> Any:
            self._landed[index] = time.perf_counter()
            return read(stream, index)

        CommTask.wait, GradientStream.read = timed, landed

    def compute(self) -> None:
        """Compute one pass of the layer that is due."""
        place = self._computed % (2 * LAYERS)
        self._computed += 1
        # Under MXNet no thread waits: the engine holds the layer back until its sum has come.
        if self._waited or not place or self._landed.get(place, 0) > self._ended:
            self._waited = False
            self.clock.sync()
        layer = self.workload.layers[0]
        self.clock.compute("forward", "", layer.forward if place < LAYERS else layer.backward)
        self._ended = time.perf_counter()


def scheduled(case: str) -> dict[str, Any]:
    """Arguments for `foretrain.attach` and `foretrain.Session` of a case."""
    return {"schedule": {"tuned": "bytescheduler"}.get(case, case), "tune": case == "tuned"}


def sessions(stack: ExitStack) -> Callable[[str], Any]:
    """Make sessions that live beside each other."""
    import foretrain as ft

    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    made: list[Any] = []

    def session(case: str) -> Any:
        made.append(None)
        known: dict[str, Any] = {"address": f"{host}:{port + len(made)}", "warmup": OBSERVED}
        return stack.enter_context(ft.Session(**scheduled(case), **known))

    return session


def in_torch(setting: Setting, stack: ExitStack) -> Cases:
    """Cases with PyTorch."""
    import torch
    import torch.distributed as dist

    import foretrain as ft
    from foretrain.lab.training import PacedModel
    from foretrain.plugins.torch import attached_model

    torch.set_num_threads(1)
    # These import PyTorch's compiler, which nothing uses here and takes half of a rank's start.
    for name in ("add_param_group", "zero_grad"):
        setattr(torch.optim.Optimizer, name, inspect.unwrap(getattr(torch.optim.Optimizer, name)))
    attached_model.hide_from_compiler = lambda: None
    dist.init_process_group("gloo")
    stack.callback(dist.destroy_process_group)

    accelerator = Accelerator(setting)
    for name in setting.cases:
        model = PacedModel(accelerator.workload, accelerator.clock)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        job: Any = None
        if name in EXCHANGED:
            ring = ft.AllReduce(backend="ring")
            job = ft.attach(model, optimizer, transport=ring, warmup=OBSERVED, **scheduled(name))
            stack.callback(job.close)

        def train(
            count: int, name: str = name, model: Any = model, optimizer: Any = optimizer, job: Any = job
        ) -> list[float]:
            ends, x = [], torch.zeros(1)
            for _ in range(count):
                model(x).sum().backward()
                if name == "after":
                    for parameter in model.parameters():
                        parameter.grad = parameter.grad.clone()  # all layers' are views of one constant
                        dist.all_reduce(parameter.grad)
                        parameter.grad /= setting.hosts
                optimizer.step()
                if name == "fifo":
                    job.synchronize()
                optimizer.zero_grad()
                ends.append(time.perf_counter())
            return ends

        yield name, train, job


def in_keras(setting: Setting, stack: ExitStack) -> Cases:
    """Cases with Keras on TensorFlow, trained by ``model.fit``."""
    # Keras and TensorFlow import these where they find them, for what is not used here.
    sys.modules |= dict.fromkeys(("jax", "pandas", "sklearn"))  # pyright: ignore[reportArgumentType]
    import keras
    import numpy as np
    import tensorflow as tf

    import foretrain as ft

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(4)
    session, accelerator = sessions(stack), Accelerator(setting)

    def computed(values: Any) -> Any:
        accelerator.compute()
        return values.copy()

    def compute(x: Any) -> Any:
        return tf.ensure_shape(tf.numpy_function(computed, [x], tf.float32, stateful=False), x.shape)

    @tf.custom_gradient
    def paced(x: Any, weight: Any) -> Any:
        def gradient(dy: Any) -> Any:
            dx = compute(dy)
            return dx, tf.fill(tf.shape(weight), 1e-3 + 0 * dx[0, 0])

        return compute(x) + 0 * weight[0], gradient

    class Layer(keras.layers.Layer):
        def __init__(self, size: int, **options: Any) -> None:
            super().__init__(**options)
            self.size = size

        def build(self, shape: Any) -> None:
            self.weight = self.add_weight(shape=(self.size,), initializer="zeros", name="weight")

        def call(self, x: Any) -> Any:
            return paced(x, tf.convert_to_tensor(self.weight))

    class After(keras.optimizers.SGD):
        exchanges = True

        def exchange(self, *gradients: Any) -> Any:
            if not self.exchanges:
                return [each.copy() for each in gradients]
            self.plain.begin_step()
            for task, each in zip(self.tasks, gradients, strict=True):
                task.ready(each.reshape(-1).copy())
            return [task.wait().copy() for task in self.tasks]

        def apply(self, grads: Any, trainable_variables: Any = None) -> None:
            if not hasattr(self, "tasks"):
                self.plain = session("fifo")
                sizes = [(v.path, 4 * int(np.prod(v.shape)), "float32") for v in trainable_variables]
                self.tasks = self.plain.declare(sizes)
            sums = tf.numpy_function(self.exchange, list(grads), [tf.float32] * len(grads))
            sums = [tf.ensure_shape(each, v.shape) for each, v in zip(sums, trainable_variables, strict=True)]
            super().apply(sums, trainable_variables)

    after: Any = None
    for name in setting.cases:
        own = session(name) if name in EXCHANGED else None
        optimizer = after.optimizer if after else After(0.1)
        if own is not None:
            optimizer = ft.keras.scheduled(keras.optimizers.SGD(0.1), own)
        if own is None and after is not None:
            model = after
        else:
            layers = [Layer(size, name=f"layer{k}") for k, size in enumerate(setting.sizes)]
            model = keras.Sequential([keras.Input((1,)), *layers])
            model.compile(optimizer, "mse", jit_compile=False)
        if own is None:
            after = model
        elif name != "fifo":
            ft.keras.attach(model)
        data = tf.data.Dataset.from_tensors((np.zeros((1, 1), np.float32),) * 2).repeat()

        def train(count: int, name: str = name, model: Any = model, data: Any = data) -> list[float]:
            ends: list[float] = []
            end = keras.callbacks.LambdaCallback(
                on_train_batch_end=lambda batch, logs: ends.append(time.perf_counter())
            )
            model.optimizer.exchanges = name != "alone"
            model.fit(data, steps_per_epoch=count, verbose=0, callbacks=[end])
            return ends

        yield name, train, own


def in_jax(setting: Setting, stack: ExitStack) -> Cases:
    """Cases with JAX, compiled."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    import foretrain as ft

    session, accelerator = sessions(stack), Accelerator(setting)

    def computed(values: Any) -> Any:
        accelerator.compute()
        return np.array(values)

    def compute(x: Any) -> Any:
        return jax.pure_callback(computed, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    @jax.custom_vjp
    def paced(x: Any, weight: Any) -> Any:
        return compute(x) + 0 * weight[0]

    def forward(x: Any, weight: Any) -> Any:
        return paced(x, weight), weight

    def backward(weight: Any, dy: Any) -> Any:
        dx = compute(dy)
        return dx, jnp.full_like(weight, 1e-3) + 0 * dx[0]

    paced.defvjp(forward, backward)
    x = jnp.zeros(1)
    params = {f"layer{k:02d}": jnp.zeros(size) for k, size in enumerate(setting.sizes)}

    def loss(params: Any, x: Any) -> Any:
        for name in sorted(params):
            x = paced(x, params[name])
        return (x * x).sum()  # so that no backward pass begins before its forward pass has ended

    def tapped(taps: Any, x: Any) -> Any:
        for name in sorted(params):
            x = paced(x, taps(name, x))
        return (x * x).sum()

    optimizer = optax.sgd(0.1)
    grads = jax.jit(jax.grad(loss))
    update = jax.jit(lambda params, grads: jax.tree.map(lambda p, g: p - 0.1 * g, params, grads))
    for name in setting.cases:
        own = None if name == "alone" else session("fifo" if name == "after" else name)
        if own is None:

            def step(state: Any) -> Any:
                return update(state, jax.block_until_ready(grads(state, x)))

            state: Any = params
        elif name == "after":
            tasks = own.declare([(key, params[key].nbytes, "float32") for key in sorted(params)])

            def step(state: Any, own: Any = own, tasks: Any = tasks) -> Any:
                found = jax.block_until_ready(grads(state, x))
                own.begin_step()
                for task, key in zip(tasks, sorted(found), strict=True):
                    task.ready(np.asarray(found[key]))
                means = {key: task.wait().copy() for task, key in zip(tasks, sorted(found), strict=True)}
                return update(state, means)

            state = params
        elif name == "fifo":
            graded = ft.jax.scheduled_value_and_grad(loss, own)

            @jax.jit
            def step(state: Any, graded: Any = graded) -> Any:
                _, means = graded(state, x)
                return jax.tree.map(lambda p, g: p - 0.1 * g, state, means)

            state = params
        else:
            updates = ft.jax.DeferredUpdates(optimizer, own)
            state = updates.init(params)

            @jax.jit
            def step(state: Any, updates: Any = updates) -> Any:
                return updates.step(lambda taps: tapped(taps, x), state)[1]

        kept = [state]

        def train(count: int, step: Any = step, kept: list[Any] = kept) -> list[float]:
            ends = []
            for _ in range(count):
                kept[0] = jax.block_until_ready(step(kept[0]))
                ends.append(time.perf_counter())
            return ends

        yield name, train, own


def in_mxnet(setting: Setting, stack: ExitStack) -> Cases:
    """Cases with MXNet's Gluon."""
    import mxnet as mx  # pyright: ignore[reportMissingImports]
    import numpy as np
    from mxnet import autograd, gluon  # pyright: ignore[reportMissingImports]

    import foretrain as ft

    session, accelerator = sessions(stack), Accelerator(setting)

    class Paced(mx.operator.CustomOp):
        def forward(self, is_train: bool, req: Any, in_data: Any, out_data: Any, aux: Any) -> None:
            accelerator.compute()
            self.assign(out_data[0], req[0], in_data[0])

        def backward(self, req: Any, out_grad: Any, in_data: Any, out_data: Any, in_grad: Any, aux: Any) -> None:
            accelerator.compute()
            self.assign(in_grad[0], req[0], out_grad[0])
            in_grad[1][:] = 1e-3

    @mx.operator.register("paced")
    class PacedProperties(mx.operator.CustomOpProp):
        def __init__(self) -> None:
            super().__init__(need_top_grad=True)

        def list_arguments(self) -> list[str]:
            return ["data", "weight"]

        def infer_shape(self, in_shape: Any) -> Any:
            return in_shape, [in_shape[0]], []

        def create_operator(self, ctx: Any, in_shapes: Any, in_dtypes: Any) -> Paced:
            return Paced()

    class Layer(gluon.nn.Block):
        def __init__(self, size: int) -> None:
            super().__init__()
            self.weight = self.params.get("weight", shape=(size,), init="zeros")

        def forward(self, x: Any) -> Any:
            return mx.nd.Custom(x, self.weight.data(), op_type="paced")

    for name in setting.cases:
        own = None if name == "alone" else session("fifo" if name == "after" else name)
        net = gluon.nn.Sequential()
        net.add(*map(Layer, setting.sizes))
        net.initialize()
        store = None if name not in EXCHANGED else ft.mxnet.ScheduledKVS(mx.kv.create("local"), own)
        if store is not None and name != "fifo":
            store.attach(net)
        trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, kvstore=store)
        parameters, tasks = list(net.collect_params().values()), ()
        if name == "after":
            tasks = own.declare([(p.name, 4 * int(np.prod(p.shape)), "float32") for p in parameters])
        x = mx.nd.ones((1, 1))
        x.attach_grad()

        def train(
            count: int,
            own: Any = own,
            barrier: bool = name in ("alone", "after", "fifo"),
            net: Any = net,
            trainer: Any = trainer,
            parameters: Any = parameters,
            tasks: Any = tasks,
            x: Any = x,
        ) -> list[float]:
            ends = []
            for _ in range(count):
                with autograd.record():
                    loss = net(x).sum()
                loss.backward()
                if tasks:
                    found = [p.grad().asnumpy().reshape(-1) for p in parameters]
                    own.begin_step()
                    for task, gradient in zip(tasks, found, strict=True):
                        task.ready(gradient)
                    for task, p in zip(tasks, parameters, strict=True):
                        p.grad()[:] = mx.nd.array(task.wait())
                trainer.step(1)
                if barrier:
                    mx.nd.waitall()
                loss.wait_to_read()  # as a script does that shows it
                ends.append(time.perf_counter())
            mx.nd.waitall()
            return ends

        yield name, train, own


def sums(samples: int = 15) -> dict[str, list[float]]:
    """Return the seconds of sums of 1 MiB, by our ring and by gloo, after PyTorch's process group is there."""
    import numpy as np
    import torch
    import torch.distributed as dist

    from foretrain.comm.collectives import RingCollectives, connect_peers
    from foretrain.comm.coordinator.addresses import local_address
    from foretrain.comm.coordinator.handshake import SECRET

    rank, ranks = dist.get_rank(), dist.get_world_size()

    def exchange(address: tuple[str, int]) -> list[Any]:
        gathered: list[Any] = [None] * ranks
        dist.all_gather_object(gathered, address)
        return gathered

    links = connect_peers(local_address(None, None), exchange, bytes.fromhex(os.environ[SECRET]), rank, ranks, 30)
    array = np.zeros(MIB // 4, np.float32)
    tensor, found = torch.from_numpy(array), dict[str, list[float]](gloo=[], ring=[])
    with closing(RingCollectives(links, rank, ranks)) as ring:
        for turn in range(3 + samples):
            for name, start in (("gloo", lambda: dist.all_reduce(tensor, async_op=True)), ("ring", None)):
                dist.barrier()
                began = time.perf_counter()
                (start() if start is not None else ring.all_reduce(array)).wait()
                if turn >= 3:
                    found[name].append(time.perf_counter() - began)
    return found


def measure(framework: str, setting: Setting) -> None:
    """Measure all cases of one framework; rank 0 prints the seconds of each step, and the schedules, as JSON."""
    from foretrain.schedule import Spec

    runs = {"torch": in_torch, "keras": in_keras, "jax": in_jax, "mxnet": in_mxnet}
    with ExitStack() as stack:
        cases = list(runs[framework](setting, stack))
        seconds: dict[str, list[float]] = {name: [] for name, *_ in cases}
        for name, train, _ in cases:
            train(1 + (OBSERVED + 1) * (name in EXCHANGED) + SEARCHED * (name == "tuned"))
        for _ in range(setting.blocks):
            for name, train, _ in cases:
                ends = train(DROPPED + setting.steps)
                seconds[name] += [b - a for a, b in zip(ends[DROPPED - 1 :], ends[DROPPED:], strict=False)]
        jobs = {
            name: {"schedule": str(Spec(job.schedule.name, job.schedule.settings)), "cost": asdict(job.cost)}
            for name, _, job in cases
            if name in EXCHANGED
        }
        found = {"seconds": seconds, "jobs": jobs} | ({"sums": sums()} if framework == "torch" else {})
        if os.environ["RANK"] == "0":
            print(json.dumps(found), flush=True)


# Around them


def settings(quick: bool) -> list[Setting]:
    """Where it is measured. Four hosts share this machine's cores, so that their links are slower."""
    if quick:
        return [Setting(2, 1e9, 0.05, 2, 8, CASES[:-2])]
    return [
        *(Setting(2, rate, 0.12, 4, 10) for rate in (1e9,)),
        *(Setting(2, rate, 0.12, 2, 10) for rate in (0.5e9, 2e9)),
        Setting(4, 0.5e9, 0.24, 2, 8),
    ]


@contextmanager
def hosts(setting: Setting) -> Iterator[Callable[[str], dict[str, Any]]]:
    """Hosts on which a framework is measured."""
    from foretrain.lab import Lab, launch

    with Lab.up("frameworks", setting.hosts, f"{setting.rate / 1e9:g}Gbps") as lab:

        def measured(framework: str) -> dict[str, Any]:
            lines: list[str] = []
            environment = {
                _WORK: json.dumps({"framework": framework, "setting": asdict(setting)}),
                "KERAS_BACKEND": "tensorflow",
                "JAX_PLATFORMS": "cpu",
                "CUDA_VISIBLE_DEVICES": "-1",
                "TF_CPP_MIN_LOG_LEVEL": "3",
            }
            command = [str(MXNET) if framework == "mxnet" else sys.executable, __file__]
            launch(lab, command, environment=environment, timeout=600, on_line=lambda rank, line: lines.append(line))
            return json.loads(next(line for line in reversed(lines) if line.startswith("{")))

        yield measured


def table(setting: Setting, framework: str, found: dict[str, Any]) -> dict[str, float]:
    """Print what was found; return the ratios."""
    from foretrain.planner.candidate_search import cluster_of
    from foretrain.schedule import CostModel, Job, bound
    from foretrain.simulation import simulate
    from foretrain.units import SECOND

    took = {name: median(values) for name, values in found["seconds"].items()}
    # What else the machine does only adds to either.
    workload = setting.workload(max(1.0, min(found["seconds"]["alone"]) / setting.compute))
    costs = {name: CostModel(**job["cost"]) for name, job in found["jobs"].items()}
    best = min(costs.values(), key=lambda cost: cost.per_byte)
    optimum = bound(workload, Job.of(workload, best)).time / SECOND
    starts = 1e6 * best.overhead / SECOND
    print(f"\n{framework}: {setting}; T* {1e3 * optimum:.1f} ms; an operation costs {starts:.0f} µs beside its bytes")
    for name, values in found["seconds"].items():
        shown = spread([1e3 * each for each in values])
        after, fifo = took["after"] / took[name], took["fifo"] / took[name]
        ratios = f"{after:5.2f} × after  {fifo:5.2f} × fifo  {took[name] / optimum:5.2f} × T*"
        told = ""
        if name in found["jobs"]:
            schedule = found["jobs"][name]["schedule"]
            where = cluster_of(costs[name], setting.hosts)
            told = simulate(workload, where, schedule, trace=False).iteration_time / SECOND
            told = f"  forecast {1e3 * told:6.1f} ms ({told / took[name] - 1:+.0%})"
        print(f"{name:14s} {shown:>26s} ms  {ratios}  {took['alone'] / took[name]:5.2f} of linear{told}")
    sys.stdout.flush()
    return {
        "vs_after": took["after"] / took["bytescheduler"],
        "vs_fifo": took["fifo"] / took["bytescheduler"],
        "gap": took["bytescheduler"] / optimum - 1,
        "most": took["after"] / optimum,
    }


def main() -> None:
    """Print a table for each framework and setting; RESULT has the first setting's ratios."""
    if work := os.environ.get(_WORK):
        given = json.loads(work)
        measure(given["framework"], Setting(**given["setting"]))
        return
    arguments = options(__doc__ or "")
    missing = {name for name, package in PACKAGES.items() if not importlib.util.find_spec(package)}
    if MXNET.exists():
        missing.discard("mxnet")
    present = [name for name in PACKAGES if name not in missing]
    for name in sorted(missing):
        remedy = ", run tools/mxnet.py" * (name == "mxnet")
        print(f"{name} is left out, and RESULT has no {name}_…: {PACKAGES[name]} is not installed{remedy}")
    details, gains, values = [], list[str](), dict[str, float]()
    for number, setting in enumerate(settings(arguments.quick)):
        with hosts(setting) as measured:
            for framework in present:
                found = measured(framework)
                ratios = table(setting, framework, found)
                details.append({"framework": framework, "setting": asdict(setting), **found})
                most = ratios.pop("most")
                if number == 0:
                    values |= {f"{framework}_{key}": ratio for key, ratio in ratios.items()}
                    gain = ratios["vs_after"]
                    row = f"{framework:8s} {PAPER:6.2f} {gain:6.2f} {gain / PAPER:6.2f} {most:8.2f}"
                    gains.append(f"{row}  {WHY}")
                    if took := found.get("sums"):
                        values["ring_vs_gloo_1mib"] = median(took["gloo"]) / median(took["ring"])
    print("\nByteScheduler's largest gain over vanilla\n          paper   ours  ratio  at most  why not the paper's")
    print("\n".join(gains))
    if "ring_vs_gloo_1mib" in values:
        print(f"\nsums of 1 MiB: gloo's time over our ring's {values['ring_vs_gloo_1mib']:.2f}")
    finish(arguments, "frameworks", values, details)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
