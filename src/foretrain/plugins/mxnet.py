"""MXNet's Gluon: a key-value store that exchanges gradients as the engine computes them.

    from foretrain.mxnet import ScheduledKVS

    kvs = ScheduledKVS(mx.kv.create("local"))
    kvs.attach(net)                        # optional: the plan then knows when each layer begins
    trainer = gluon.Trainer(net.collect_params(), "adam", kvstore=kvs)

Where ByteScheduler (SOSP'19, §5) and Prophet began. MXNet is retired; this is for its last release, 1.9.1.

# Note [Engine]
MXNet's calls return before anything is computed: its engine runs an operation when what it reads is there. An exchange
is such an operation, in the gradient's place: it begins when the gradient is computed, and is over when the sum is
written there. So a layer's update waits for its own sum, and its next forward pass for its own update: the
paper's dependency proxy. No thread of the engine waits meanwhile, and the script runs ahead as it does without a store.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

# The engine would release gradients in two or three bunches, and update weights by four.
os.environ.setdefault("MXNET_EXEC_BULK_EXEC_TRAIN", "0")
os.environ.setdefault("MXNET_OPTIMIZER_AGGREGATION_SIZE", "1")

import mxnet as mx  # pyright: ignore[reportMissingImports]
from mxnet import gluon  # pyright: ignore[reportMissingImports]

from foretrain.comm.session import Session
from foretrain.errors import ConfigError, ForetrainError
from foretrain.plugins.gradient_stream import GradientSpec, GradientStream, broadcast, warn_if_untested

# MXNet stops its engine before a fork, with the interpreter's lock held, which exchanges need to end.
os.register_at_fork(before=lambda: _settle())


class ScheduledKVS(mx.kvstore.KVStoreBase):
    """Key-value store of MXNet whose gradients foretrain exchanges, for `mxnet.gluon.Trainer`. Collective.

    As with MXNet's own distributed stores gradients are summed, so that ``trainer.step`` takes the number of samples on
    all ranks. Weights become rank 0's in the first step. If the job fails, gradients whose sums do not come become NaN,
    and with them weights; the trainer's next step, `flush` and the session's end raise the reason.

    Args:
        kvs: a store of one process, as of ``mx.kv.create("local")``; what is not exchanged is left to it.
        session: where gradients are exchanged; None makes one of what ``foretrain run`` says, with sums.

    Raises:
        ConfigError: ``kvs`` is distributed itself, or MXNet runs without its engine.
    """

    def __init__(self, kvs: Any = None, session: Session | None = None) -> None:
        if kvs is not None and "dist" in kvs.type:
            raise ConfigError("kvs", kvs.type, "exchanges gradients itself", "write mx.kv.create('local')")
        if os.environ.get("MXNET_ENGINE_TYPE") == "NaiveEngine":
            raise ConfigError("MXNET_ENGINE_TYPE", "NaiveEngine", "has no asynchronous operations", "leave it unset")
        self.stream = GradientStream(session or Session(average=False))
        warn_if_untested(self.stream.session.rank, "mxnet", mx.__version__, "1.9")
        self._local = kvs
        self._keys: dict[int | str, int] = {}
        """Number of each gradient, by key."""
        self._specs: list[GradientSpec] = []
        self._weights: list[Any] = []
        """Array of each gradient's parameter."""
        self._net: Any = None
        self._errors: list[BaseException] = []
        self._in_flight, self._changed = 0, threading.Condition()
        self._waiting: set[_Exchange] = set()
        """Exchanges whose gradients are not computed yet."""
        self._landed: queue.SimpleQueue[_Exchange | None] = queue.SimpleQueue()
        self._step = _Step()
        """The one that the trainer goes through."""
        self._gate = mx.nd.zeros(1, mx.cpu())
        """Array that exchanges read and each step writes first: those of a step begin when all of the last are over."""
        self.stream.session.before_close(self.flush)

    # ── calls of the trainer ──

    def broadcast(self, key: int | str, value: Any, out: Any, priority: int = 0) -> None:
        """Copy rank 0's ``value`` to ``out`` on all ranks; raise Disagreement where their shapes or types differ."""
        first = value[0] if isinstance(value, list) else value
        if key in self._keys and self._weights[self._keys[key]] is not first:
            raise ConfigError(f"key {key}", self.type, "is another trainer's", "make a session and a store for each")
        (values,) = broadcast(self.stream.session, [(f"parameter{key}.value", first.asnumpy())])
        for array in out if isinstance(out, list) else [out]:
            array[:] = mx.nd.array(values, dtype=values.dtype)
        if first.grad is not None and key not in self._keys:
            self._keys[key] = len(self._keys)
            self._weights.append(first)
            self._specs.append(GradientSpec(f"parameter{key}.value", values.shape, values.dtype))

    def pushpull(self, key: int | str, value: Any, out: Any = None, priority: int = 0) -> None:
        """Let the engine exchange the gradient ``value`` once it is computed; the sum is in ``out``, or else there."""
        arrays = value if isinstance(value, list) else [value]
        if len(arrays) != 1 or key not in self._keys or arrays[0].stype != "default":
            problem = "is on several devices, sparse, or unknown"
            raise ConfigError(f"key {key}", len(arrays), problem, "train dense parameters on one device per process")
        self._raise()
        self.stream.declare(self._specs, ordered=self._net is None)
        gradient = arrays[0]
        # What the exchange reads and writes is on the host.
        host = gradient if gradient.context.device_type == "cpu" else gradient.as_in_context(mx.cpu())
        number = self._keys[key]
        with self._changed:
            if number in self._step.gradients:
                self._step = _Step()
                self._gate += 1
            self._step.gradients.add(number)
            exchange = _Exchange(number, host, self._step)
            self._waiting.add(exchange)
            self._in_flight += 1
            if self._in_flight == 1:
                threading.Thread(target=self._finish, name="foretrain-mxnet", daemon=True).start()
        _enqueue(partial(self._begin, exchange), reads=(self._gate,), writes=(host,), order=priority)
        target = gradient if out is None else out[0] if isinstance(out, list) else out
        if target is not host:
            host.copyto(target)

    def is_capable(self, capability: str) -> bool:
        """Return whether the store can do what ``capability`` names: it leaves updates to the trainer."""
        return False

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

    # ── for scripts ──

    def attach(self, net: gluon.Block) -> None:
        """Observe in the first steps when each layer of ``net`` begins, so that the schedule knows what is urgent when.

        Call it before the trainer's first step. A block that is hybridized begins as a whole.

        Raises:
            ConfigError: a net is attached already, or the trainer has made a step.
        """
        if self._net is not None or self._keys:
            raise ConfigError("net", net.name, "comes too late", "attach one net, before the trainer's first step")
        self._net = net
        for block in _units(net):
            block.register_forward_pre_hook(self._enter)

    def flush(self) -> None:
        """Wait until all sums that are due have come: the global barrier. Raise what has kept one from coming."""
        try:
            mx.nd.waitall()
        except mx.MXNetError as error:
            self._errors.append(error)
        with self._changed:
            if self._waiting:  # for an operation that has failed: the engine has skipped them
                self._in_flight -= len(self._waiting)
                self._waiting.clear()
                if not self._in_flight:
                    self._landed.put(None)
            while self._in_flight:
                self._changed.wait()
        self._raise()

    def _raise(self) -> None:
        if self._errors:
            raise self._errors[0]

    # ── calls of the engine, and what follows them ──

    def _begin(self, exchange: _Exchange, done: Callable[[], None]) -> None:
        exchange.done = done
        with self._changed:
            self._waiting.discard(exchange)
        try:
            self.stream.push(exchange.number, exchange.values(), partial(self._landed.put, exchange))
        except BaseException as error:
            exchange.error = error
            self._landed.put(exchange)
            return
        with self._changed:
            exchange.step.pushed += 1
            last = exchange.step.pushed == len(exchange.step.gradients)
        if last:  # of those that the trainer has come to: others may have no gradient
            with suppress(ForetrainError):  # which ends the job, and is told where sums are read
                self.stream.session.flush()

    def _finish(self) -> None:
        """Write sums to their gradients as they come, until none is in flight."""
        held: list[_Exchange] = []
        while (landed := self._landed.get()) is not None:
            held.append(landed)
            landed.step.came += 1
            observing = self.stream.session.workload is None and not self._errors and landed.error is None
            # While steps are observed no layer may wait for its own sum alone: its times would be the network's.
            if observing and landed.step.came < len(landed.step.gradients):
                continue
            for each in held:
                try:
                    if each.error is not None:
                        raise each.error
                    if observing and self._net is None:
                        self.stream.wait(each.number)
                    each.values()[...] = self.stream.read(each.number)
                except BaseException as error:
                    self._errors.append(error)
                    each.values()[...] = np.nan
                each.done()
            with self._changed:
                self._in_flight -= len(held)
                held.clear()
                self._changed.notify_all()
                if not self._in_flight:
                    return

    def _enter(self, block: gluon.Block, inputs: Any) -> None:
        if self.stream.session.workload is not None or not self._keys:
            return
        own = (block.collect_params() if _active(block) else block._reg_params).values()
        weights = [array for p in own if p._data is not None for array in p.list_data()]
        numbers = [number for number, each in enumerate(self._weights) if any(each is one for one in weights)]
        before = [each for each in inputs if isinstance(each, mx.nd.NDArray)]
        if numbers:
            # As if it wrote the weights, so that the layer begins after it.
            _enqueue(partial(self._entered, numbers), reads=before, writes=weights)

    def _entered(self, numbers: Sequence[int], done: Callable[[], None]) -> None:
        """Note that a layer's inputs and weights are there: it begins."""
        try:
            for number in numbers:
                self.stream.wait(number)
        except BaseException as error:
            self._errors.append(error)
        done()


class _Step:
    """Step of the trainer: the gradients that it has come to, and how many were handed over, and have come back."""

    def __init__(self) -> None:
        self.gradients: set[int] = set()
        self.pushed = self.came = 0


class _Exchange:
    """Exchange of one gradient in one step.

    Attributes:
        number: of the gradient.
        array: of MXNet, on the host.
        step: which it is part of.
        done: tells the engine that it is over.
        error: what has kept the gradient from being handed over.
    """

    def __init__(self, number: int, array: Any, step: _Step) -> None:
        self.number, self.array, self.step = number, array, step
        self.done: Callable[[], None] = lambda: None
        self.error: BaseException | None = None

    def values(self) -> NDArray[Any]:
        """Return the array's memory. Only while the engine runs the exchange."""
        at, dtype, shape = ctypes.c_void_p(), np.dtype(self.array.dtype), self.array.shape
        _check(mx.base._LIB.MXNDArrayGetData(self.array.handle, ctypes.byref(at)))
        count = int(np.prod(shape))
        memory: Any = (ctypes.c_char * (count * dtype.itemsize)).from_address(at.value or 0)
        return np.frombuffer(memory, dtype, count).reshape(shape)


def _settle() -> None:
    """Wait until the engine has nothing to do."""
    with suppress(mx.MXNetError):
        mx.nd.waitall()


def _active(block: Any) -> bool:
    """Return whether ``block`` runs as one compiled graph, which has no entries of layers."""
    return bool(getattr(block, "_active", False))


def _units(block: Any) -> list[Any]:
    """Return the blocks that are entered one by one: hybridized ones as a whole, others with what they hold."""
    if _active(block):
        return [block]
    found = [unit for child in block._children.values() for unit in _units(child)]
    return [*([block] if block._reg_params else []), *found]


# ── operations of MXNet's engine, by its C interface (c_api.h, engine.h of 1.9) ──

_CPU = (ctypes.c_int32 * 2)(1, 0)
"""The context."""
_PRIORITIZED = ctypes.c_int(3)
"""The property of an operation that runs beside those that compute, on threads of its own."""
_COMPLETE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
_operations: dict[int, Callable[[Callable[[], None]], None]] = {}
_tokens = itertools.count(1)


@ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
def _run(context: int, on_complete: int, token: int) -> None:
    # The engine's callback is three words, which are gone when this returns: a function and two of its arguments.
    function, engine, operation = (ctypes.c_void_p * 3).from_address(on_complete)
    _operations.pop(token)(partial(_COMPLETE(function), engine, operation, None))


def _enqueue(
    run: Callable[[Callable[[], None]], None], *, reads: Sequence[Any] = (), writes: Sequence[Any] = (), order: int = 0
) -> None:
    """Let the engine call ``run`` once the arrays are there; the operation is over when what it is given is called.

    Args:
        run: called by a thread of the engine; raises nothing.
        reads: arrays that others may read meanwhile.
        writes: arrays that nobody else may use meanwhile.
        order: larger ones go first, of those that can run.
    """
    token = next(_tokens)
    _operations[token] = run
    read, written = ((ctypes.c_void_p * len(arrays))(*(each.handle for each in arrays)) for arrays in (reads, writes))
    known = (ctypes.byref(_PRIORITIZED), order, b"foretrain", False)
    pushed = (read, len(reads), written, len(writes), *known)
    _check(mx.base._LIB.MXEnginePushAsyncND(_run, ctypes.c_void_p(token), None, ctypes.byref(_CPU), *pushed))


def _check(status: int) -> None:
    mx.base.check_call(status)
