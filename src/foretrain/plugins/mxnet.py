"""MXNet's Gluon: a key-value store that exchanges gradients as the engine computes them.

    from foretrain.mxnet import ScheduledKVS

    kvs = ScheduledKVS(mx.kv.create("local"))
    kvs.attach(net)                        # optional: communication then goes on during the next forward pass
    trainer = gluon.Trainer(net.collect_params(), "adam", kvstore=kvs)

Where ByteScheduler (SOSP'19, §5) and Prophet began. MXNet is retired; this is for its last release, 1.9.1.

# Note [Engine]
MXNet's calls return before anything is computed. A thread per gradient waits until the engine has it, and hands it on.
Without `attach` the last gradient's call waits for all sums, before the trainer's updates are enqueued. With it, a
layer's next forward pass waits for its own sums, and updates its weights then: the paper's dependency proxy, as a hook
before the layer instead of an operation in the engine.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

os.environ.setdefault("MXNET_EXEC_BULK_EXEC_TRAIN", "0")  # else the engine releases gradients in two or three bunches

import mxnet as mx  # pyright: ignore[reportMissingImports]
from mxnet import autograd, gluon  # pyright: ignore[reportMissingImports]

from foretrain.comm.session import Session
from foretrain.errors import ConfigError
from foretrain.plugins.gradient_stream import GradientSpec, GradientStream, broadcast, warn_if_untested


class _Due(NamedTuple):
    """Update that a layer's next entry makes: the arrays, and what the optimizer was set to."""

    weight: Any
    rate: float | None
    rescale: float


class ScheduledKVS(mx.kvstore.KVStoreBase):
    """Key-value store of MXNet whose gradients foretrain exchanges, for `mxnet.gluon.Trainer`. Collective.

    As with MXNet's own distributed stores gradients are summed, so that ``trainer.step`` takes the number of samples on
    all ranks. Weights become rank 0's in the first step.

    Args:
        kvs: a store of one process, as of ``mx.kv.create("local")``; what is not exchanged is left to it.
        session: where gradients are exchanged; None makes one of what ``foretrain run`` says, with sums.

    Raises:
        ConfigError: ``kvs`` is distributed itself.
    """

    def __init__(self, kvs: Any = None, session: Session | None = None) -> None:
        if kvs is not None and "dist" in kvs.type:
            raise ConfigError("kvs", kvs.type, "exchanges gradients itself", "write mx.kv.create('local')")
        self.stream = GradientStream(session or Session(average=False))
        warn_if_untested(self.stream.session.rank, "mxnet", mx.__version__, "1.9")
        self._local = kvs
        self._keys: dict[int | str, int] = {}
        """Number of each gradient, by key."""
        self._specs: list[GradientSpec] = []
        self._pushing: dict[int, threading.Thread] = {}
        self._arrays: dict[int, Any] = {}
        self._errors: list[BaseException] = []
        self._due: dict[int, _Due] = {}
        """Updates that wait for their layers' next entries."""
        self._numbers: dict[int, int] = {}
        """Number of each gradient, by the identity of its parameter's array."""
        self._net: Any = None
        self._updater: Any = None
        self._optimizer: Any = None
        # Before MXNet's own end, which waits for its engine: what still computes a gradient may be in Python.
        atexit.register(self._settle)

    # ── calls of the trainer ──

    def broadcast(self, key: int | str, value: Any, out: Any, priority: int = 0) -> None:
        """Copy rank 0's ``value`` to ``out`` on all ranks; raise Disagreement where their shapes or types differ."""
        first = value[0] if isinstance(value, list) else value
        (values,) = broadcast(self.stream.session, [(f"parameter{key}.value", first.asnumpy())])
        for array in out if isinstance(out, list) else [out]:
            array[:] = mx.nd.array(values, dtype=values.dtype)
        if first.grad is not None and key not in self._keys:
            number = self._keys[key] = len(self._keys)
            self._numbers[id(first)] = number
            self._specs.append(GradientSpec(f"parameter{key}.value", values.shape, values.dtype))

    def pushpull(self, key: int | str, value: Any, out: Any = None, priority: int = 0) -> None:
        """Hand the gradient ``value`` over once it is computed; the last one waits for all sums, unless attached."""
        arrays = value if isinstance(value, list) else [value]
        if len(arrays) != 1 or key not in self._keys or arrays[0].stype != "default":
            problem = "is on several devices, sparse, or unknown"
            raise ConfigError(f"key {key}", len(arrays), problem, "train dense parameters on one device per process")
        self.stream.declare(self._specs, ordered=self._updater is None)
        number, gradient = self._keys[key], arrays[0]
        if number in self._due:
            remedy = "hybridize the layers one by one, or leave attach() out"
            raise ConfigError(f"key {key}", "attach", "belongs to a layer that was not entered since its last", remedy)
        # With attach() the script goes on, and may change the gradient before it has gone, as zero_grad() does.
        sent = gradient if self._updater is None else gradient.copy()
        push = threading.Thread(target=self._push, args=(number, sent), name=f"foretrain-push-{number}", daemon=True)
        self._pushing[number], self._arrays[number] = push, gradient
        push.start()
        if self._updater is not None:
            weight = out[0] if isinstance(out, list) else out
            optimizer = self._optimizer
            rate = optimizer.lr if optimizer.lr_scheduler is None else None
            self._due[number] = _Due(weight, rate, optimizer.rescale_grad)
        elif len(self._pushing) == len(self._keys):
            self._join()
            for each, array in self._arrays.items():
                array[:] = mx.nd.array(self.stream.wait(each), dtype=array.dtype)
            self._arrays.clear()

    def is_capable(self, capability: str) -> bool:
        """Return whether the store can do what ``capability`` names: update weights, where a net is attached."""
        return capability == self.OPTIMIZER and self._net is not None

    def set_optimizer(self, optimizer: Any) -> None:
        """Update weights by ``optimizer``, at the entries of the attached net's layers."""
        self._optimizer, self._updater = optimizer, mx.optimizer.get_updater(optimizer)

    def save_optimizer_states(self, fname: str, dump_optimizer: bool = False) -> None:
        """Write the optimizer's state to a file, with all updates done."""
        self.flush()
        with open(fname, "wb") as file:
            file.write(self._updater.get_states(dump_optimizer))

    def load_optimizer_states(self, fname: str) -> None:
        """Read the optimizer's state from a file."""
        with open(fname, "rb") as file:
            self._updater.set_states(file.read())

    @property
    def type(self) -> str:
        """Return the store's kind."""
        return "foretrain"

    @property
    def rank(self) -> int:
        """Return the rank of this process."""
        return self.stream.session.rank

    @property
    def num_workers(self) -> int:
        """Return the number of ranks."""
        return self.stream.session.ranks

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or self._local is None:
            raise AttributeError(name)
        return getattr(self._local, name)

    # ── across steps ──

    def attach(self, net: gluon.Block) -> None:
        """Let communication go on across steps: each layer of ``net`` waits for its own sums where it begins.

        Call it before the trainer's first step. A block that is hybridized waits as a whole: hybridize layers one by
        one. `flush`, and saving the net's parameters, do all updates that are due.

        Raises:
            ConfigError: a net is attached already, or the trainer updates by itself already.
        """
        if self._net is not None or self._keys:
            raise ConfigError("net", net.name, "comes too late", "attach one net, before the trainer's first step")
        self._net = net
        for block in _units(net):
            block.register_forward_pre_hook(self._enter)
        for name in ("save_parameters", "export"):
            if hasattr(net, name):
                setattr(net, name, _after(self.flush, getattr(net, name)))

    def flush(self) -> None:
        """Do all updates that are due."""
        self._update(list(self._due))

    def _enter(self, block: gluon.Block, inputs: Any) -> None:
        if self._due:
            own = (block.collect_params() if _active(block) else block._reg_params).values()
            numbers = [self._numbers.get(id(array)) for p in own if p._data is not None for array in p.list_data()]
            self._update([number for number in numbers if number in self._due])

    def _update(self, numbers: Sequence[int]) -> None:
        if not numbers:
            return
        self._join()
        keys = {number: key for key, number in self._keys.items()}
        with autograd.pause():
            for number in numbers:
                due = self._due.pop(number)
                mean = mx.nd.array(self.stream.wait(number), dtype=due.weight.dtype)
                optimizer = self._optimizer
                now = optimizer.lr, optimizer.rescale_grad
                optimizer.rescale_grad = due.rescale
                if due.rate is not None:
                    optimizer.lr = due.rate
                try:
                    self._updater(keys[number], mean, due.weight)
                finally:
                    optimizer.lr, optimizer.rescale_grad = now

    def _push(self, number: int, gradient: Any) -> None:
        try:
            gradient.wait_to_read()
            self.stream.push(number, gradient.asnumpy())
        except BaseException as error:
            self._errors.append(error)

    def _settle(self) -> None:
        """Wait until nothing waits for the engine."""
        for push in self._pushing.values():
            push.join()

    def _join(self) -> None:
        """Wait until all gradients of the step have gone; raise what kept one from going."""
        for push in self._pushing.values():
            push.join()
        self._pushing.clear()
        if self._errors:
            raise self._errors.pop()


def _active(block: Any) -> bool:
    """Return whether ``block`` runs as one compiled graph, in which no layer can wait."""
    return bool(getattr(block, "_active", False))


def _units(block: Any) -> list[Any]:
    """Return the blocks that are entered one by one: hybridized ones as a whole, others with what they hold."""
    if _active(block):
        return [block]
    found = [unit for child in block._children.values() for unit in _units(child)]
    return [*([block] if block._reg_params else []), *found]


def _after(first: Callable[[], None], method: Callable[..., Any]) -> Callable[..., Any]:
    def called(*args: Any, **options: Any) -> Any:
        first()
        return method(*args, **options)

    return called
