"""The packet simulator: a program of flows on a topology, packet by packet.

    network = Packets(topology, transport=Dctcp(), switches=Queues(limit=200_000, mark_from=65_000, mark_to=65_000))
    outcome = network.run(program)
    outcome.finish                               # when each flow had come, ps

Times are int ps.

An outcome has counters of each port and class, flow completion times, and traces of queues.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from foretrain.errors import ConfigError
from foretrain.network.packet import state as c
from foretrain.network.packet.kernels import Kernel, StallDetector, chosen, stalled
from foretrain.network.packet.loading import Prepared, empty, grow, prepared
from foretrain.network.packet.online_simulator import Online
from foretrain.network.packet.port_config import LinkLosses, Queues
from foretrain.network.packet.transports.transport import DEFAULT, Transport
from foretrain.network.program import Paths, Program
from foretrain.network.topology.graph import Topology
from foretrain.units import Time


@dataclass(frozen=True, slots=True, eq=False)
class PortCounters:
    """Counts of each port and class, int64 (links, 8).

    Attributes:
        packets, bytes: that it sent, with headers; what its wire lost among them.
        drops, dropped_bytes: that found no room, by the class that they were of.
        marks: packets that were told of congestion.
        deepest: the most bytes that ever waited.
        losses: packets that its wire lost.
        cuts: packets that lost their data for lack of room.
    """

    packets: NDArray[np.int64]
    bytes: NDArray[np.int64]
    drops: NDArray[np.int64]
    dropped_bytes: NDArray[np.int64]
    marks: NDArray[np.int64]
    deepest: NDArray[np.int64]
    losses: NDArray[np.int64]
    cuts: NDArray[np.int64]

    @classmethod
    def of(cls, counts: NDArray[np.int64]) -> PortCounters:
        """Return the columns of the kernels' counts, (links, classes, columns)."""
        columns = (c.PACKETS_OUT, c.BYTES_OUT, c.DROPPED, c.DROPPED_BYTES, c.MARKS, c.DEEPEST, c.LOST, c.CUT_DOWN)
        return cls(*(counts[:, :, column] for column in columns))


@dataclass(frozen=True, slots=True)
class Distribution:
    """Distribution of times, ps: mean, quantiles (of n, the ⌈q·n⌉-th smallest) and maximum.

    Attributes:
        mean, median, p95, p99, p999, largest: 0 where there is nothing.
    """

    mean: float
    median: int
    p95: int
    p99: int
    p999: int
    largest: int

    @classmethod
    def of(cls, times: NDArray[np.int64]) -> Distribution:
        """Return the distribution of ``times``."""
        if not len(times):
            return cls(0.0, 0, 0, 0, 0, 0)
        ordered = np.sort(times)
        median, p95, p99, p999 = (int(ordered[max(0, -(-q * len(times) // 1000) - 1)]) for q in (500, 950, 990, 999))
        return cls(float(ordered.mean()), median, p95, p99, p999, int(ordered[-1]))


@dataclass(frozen=True, slots=True, eq=False)
class QueueTrace:
    """Bytes in watched queues over time.

    Attributes:
        time: ps, int64 (samples,), from 0 on in equal steps.
        bytes: int64 (samples, links), in the order in which they were asked for.
    """

    time: NDArray[np.int64]
    bytes: NDArray[np.int64]


def taken(state: c.PacketState) -> NDArray[np.int64]:
    """Return the trace rows that the kernel has written, and make room for new ones."""
    rows = state.trace[: state.memory[c.TRACED]].copy()
    state.memory[c.TRACED] = 0
    return rows


def trace_of(samples: list[NDArray[np.int64]], ready: Prepared) -> QueueTrace:
    """Join all samples; one that is missing, since nothing happened, equals the next one."""
    if not samples:
        return QueueTrace(np.zeros(0, np.int64), np.zeros((0, 0), np.int64))
    rows = np.concatenate(samples)
    numbers = rows[:, 0]
    step = int(ready.state.memory[c.TRACE_EVERY]) << int(ready.state.memory[c.SHIFT])
    everything = np.arange(numbers[-1] + 1) if len(numbers) else np.zeros(0, np.int64)
    return QueueTrace(everything * step, rows[np.searchsorted(numbers, everything), 1:])


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """Result of a packet simulation; columns have shape (flows,) unless noted.

    Attributes:
        begun: ps, when the first packet of each flow went; -1 for flows that cross no link.
        finish: ps, when its last byte had come, int64.
        sent: data packets, repeated ones included.
        repeated: how many of them were.
        timeouts: how often its timer ran out.
        came: of each flow bool (steps, packets): which packets its receiver has taken. All of them, unless losses are
            bounded.
        counts: int64 (links, classes, columns) of `foretrain.network.packet.state`; `ports` has them by name.
        hops: packets sent by ports.
        data_hops: those with data.
        made: packets that hosts have sent, replies included.
        arrived: data packets that came to their hosts, repeated ones included.
        drops: packets that found no room.
        cuts: packets that lost their data for lack of room.
        losses: packets that wires lost.
        pauses: frames that had a port pause a class.
        trace: what waited in the watched queues.
        end: ps, when the last packet came.
        under_way: packets that are somewhere still.
    """

    begun: NDArray[np.int64]
    finish: NDArray[np.int64]
    sent: NDArray[np.int64]
    repeated: NDArray[np.int64]
    timeouts: NDArray[np.int64]
    came: list[NDArray[np.bool_]]
    counts: NDArray[np.int64]
    hops: int
    data_hops: int
    made: int
    arrived: int
    drops: int
    cuts: int
    losses: int
    pauses: int
    trace: QueueTrace
    end: Time
    under_way: int

    @property
    def ports(self) -> PortCounters:
        """Return what each class of each port has sent, marked, dropped, trimmed and lost, and its longest queue."""
        return PortCounters.of(self.counts)

    @property
    def completion(self) -> NDArray[np.int64]:
        """Return each flow's time from its first packet to its last byte, ps; 0 where it crosses no link."""
        return np.where(self.begun < 0, 0, self.finish - self.begun)

    @property
    def completions(self) -> Distribution:
        """Return the distribution of flow completion times, of flows that cross links."""
        return Distribution.of(self.completion[self.begun >= 0])


class Packets:
    """A network of packets. Each `run` begins with empty queues.

    Args:
        topology: nodes and links; what a link takes includes the node behind it.
        transport: of all flows.
        hosts: queues of the ports of what does not forward; unlimited, as a host holds back what it cannot send.
        switches: those of all others.
        losses: by link, what wires lose.
        seed: of what is random.
        kernel: ``"auto"`` takes windows unless a link is too short for them.
    """

    def __init__(
        self,
        topology: Topology,
        *,
        transport: Transport = DEFAULT,
        hosts: Queues | None = None,
        switches: Queues | None = None,
        losses: Mapping[int, LinkLosses] | None = None,
        seed: int = 0,
        kernel: Kernel = "auto",
    ) -> None:
        if not 0 <= seed < 2**32:
            raise ConfigError("seed", seed, "is not a whole number from 0 to 4294967295", "write e.g. seed=1")
        self.topology, self.transport, self._seed = topology, transport, seed
        self._hosts, self._switches, self._losses = hosts or Queues(), switches or Queues(), dict(losses or {})
        for link in self._losses:
            if not 0 <= link < topology.links:
                raise ConfigError("losses", link, "is no link", f"links are 0 to {topology.links - 1}")
        self._kernel: Kernel = kernel

    def run(
        self,
        program: Program,
        *,
        others: Sequence[Paths] = (),
        important: Sequence[NDArray[np.bool_]] | None = None,
        watch: Sequence[int] = (),
        every: Time = 0,
        progress: Callable[[int, int], None] | None = None,
    ) -> Outcome:
        """Simulate ``program`` to its end.

        Args:
            program: its weights are of no meaning here; a priority is the class of a flow's packets, 0 to 7.
            others: more paths of each flow, besides the program's own; packets take them all in turn.
            important: of each flow bool (steps, packets): packets that are marked rather than dropped, besides those
                that its transport chooses.
            watch: links whose queues are looked at every ``every`` ps (0: every window).
            progress: told now and then how many packets have come, of how many; at the end, that all have.

        Raises:
            ConfigError: a path crosses a link that is down, or one that leads nowhere back; a priority is no class.
            StallError: flows wait for each other, or ports that pause each other, or for what a dead wire loses.
        """
        for link in watch:
            if not 0 <= link < self.topology.links:
                raise ConfigError("watch", link, "is no link", f"links are 0 to {self.topology.links - 1}")
        if every < 0:
            raise ConfigError("every", every, "is negative", "give ps")
        ready = prepared(
            self.topology,
            program,
            others,
            self.transport,
            (self._hosts, self._switches),
            self._losses,
            self._seed,
            important,
            (watch, every),
        )
        packets, kernel = (
            int((ready.flow[:, c.PACKETS] * ready.flow[:, c.STEPS]).sum()),
            chosen(self._kernel, ready.shortest),
        )
        samples: list[NDArray[np.int64]] = []
        flows = ready.first_flow + c.FLOW_COLUMNS * np.arange(ready.flows)
        detector = StallDetector(ready, flows)
        kernel.load(ready.state)
        while True:
            why = kernel.run(ready.state)
            if len(watch):
                samples.append(taken(ready.state))
            detector.check()
            if why == c.GROW:
                grow(ready.state)
            elif why == c.DONE_ALL:
                if progress is not None:
                    progress(packets, packets)
                return _outcome(ready, samples)
            elif why in (c.STUCK, c.THERE):  # nothing is left to happen, or not before the end of all time
                raise stalled(ready, flows)
            if progress is not None:
                progress(min(int(ready.state.memory[c.ARRIVED]), packets), packets)

    def online(self) -> Online:
        """Return this network, empty, as a simulator to which programs are added while time passes."""
        queues = self._hosts, self._switches
        ready = empty(self.topology, self.transport, queues, self._losses, self._seed)
        return Online(ready, chosen(self._kernel, ready.shortest))


def _outcome(ready: Prepared, samples: list[NDArray[np.int64]]) -> Outcome:
    flow, m, port = ready.flow, ready.state.memory, ready.port
    return Outcome(
        begun=flow[:, c.BEGUN].copy(),
        finish=flow[:, c.END].copy(),
        sent=flow[:, c.SENT_PACKETS].copy(),
        repeated=flow[:, c.SENT_AGAIN].copy(),
        timeouts=flow[:, c.TIMEOUTS].copy(),
        came=_came(ready),
        counts=port[:, c.TALLY :].reshape(len(port), c.CLASSES, c.COUNT_COLUMNS).copy(),
        hops=int(m[c.HOPS]),
        data_hops=int(m[c.DATA_HOPS]),
        made=int(m[c.STAMPS]),
        arrived=int(m[c.ARRIVED]),
        drops=int(m[c.DROPS]),
        cuts=int(m[c.CUTS]),
        losses=int(m[c.LOSSES]),
        pauses=int(m[c.PAUSES]),
        trace=trace_of(samples, ready),
        end=int(m[c.LAST_TIME]),
        under_way=len(ready.state.far) - int(m[c.FREES]),
    )


def _came(ready: Prepared) -> list[NDArray[np.bool_]]:
    found = []
    for row in ready.flow:
        packets, first = int(row[c.PACKETS] * row[c.STEPS]), int(row[c.BITS]) // 32
        words = ready.state.memory[first : first - (-packets // 32)].astype(np.uint32)
        bits = np.unpackbits(words.view(np.uint8), count=packets, bitorder="little").astype(bool)
        found.append(bits.reshape(row[c.STEPS], row[c.PACKETS]))
    return found
