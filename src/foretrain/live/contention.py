"""Patterns in flight: alone they take a known time, and those that share links are simulated flow by flow.

# Note [Domains]
Patterns in flight form *domains*: patterns that share links, directly or through others. A domain's future is a
function of what began in it and when, so it is remembered as a tree of such *moments*: where the same begins again at
the same distances, as in every step of a training, nothing is simulated. Only what is not known yet makes a domain
simulate, from its beginning. Times inside a domain count from there, so that it has the same future at any time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter

from foretrain.live.comm_pattern import CommPattern
from foretrain.network.program import NetworkSimulator, ProgramHandle
from foretrain.network.topology.graph import Topology
from foretrain.simulation.world import ARRIVAL, TIMER, VirtualWorld
from foretrain.units import Time

_MOST_MOMENTS = 100_000
"""Remembered; then memory begins anew. A training that repeats itself has a few hundred."""

Done = Callable[[], None]


@dataclass(slots=True, eq=False)
class _MemoNode:
    """Node of the memory of domains: a pattern has just begun.

    Attributes:
        after: by (when, what) begins next, the moment then.
        ends: what completes afterwards if nothing comes, as far as is known: when, and the numbers of the patterns;
            None for them where something always came before.
    """

    after: dict[tuple[Time, CommPattern], _MemoNode] = field(default_factory=dict)
    ends: list[tuple[Time, tuple[int, ...] | None]] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Entry:
    """Pattern in flight; ``sequence`` is its number in the order of beginnings."""

    pattern: CommPattern
    began: Time
    sequence: int
    done: Done | None


class Contention:
    """Patterns in flight on the network's links, by domain.

    Args:
        world: the virtual clock.
        topology: the network.
    """

    def __init__(self, world: VirtualWorld, topology: Topology) -> None:
        self._world = world
        self._topology = topology
        self._domains: list[_Domain] = []
        self._root = _MemoNode()
        self._moments = 0
        self._sequence = 0

    def begin(self, pattern: CommPattern, done: Done) -> None:
        """Start ``pattern`` now; call ``done`` through the world when it has completed."""
        now = self._world.now()
        met = [domain for domain in self._domains if domain.meets(pattern.links)]
        self._sequence += 1
        entry = _Entry(pattern, now, self._sequence, done)
        if len(met) == 1:
            domain = met[0]
            domain.add(entry)
        else:
            # Domains that met nobody before become one: from the beginning of the first, as if they had been.
            self._domains = [domain for domain in self._domains if domain not in met]
            for old in met:
                old.asked += 1  # What it was to be called for is the new one's.
            history = sorted([entry, *(old for domain in met for old in domain.history)], key=attrgetter("sequence"))
            self._forget_some()
            domain = _Domain(self._root, history, self._topology)
            self._domains.append(domain)
        self._moments += 1
        self._arm(domain)

    def _forget_some(self) -> None:
        if self._moments > _MOST_MOMENTS:
            self._root, self._moments = _MemoNode(), 0

    def _arm(self, domain: _Domain) -> None:
        """Schedule a call when the next pattern of ``domain`` completes, if nothing else comes before."""
        domain.asked += 1
        # What went on as packets and is now a fluid may turn out to have been faster.
        when = max(domain.next(), self._world.now())
        self._world.schedule(when, ARRIVAL, self._arrive, domain, domain.asked)

    def _arrive(self, domain: _Domain, asked: int) -> None:
        if asked != domain.asked:
            return  # Something came in between, and changed when.
        for entry in domain.completed(self._world.now()):
            assert entry.done is not None
            self._world.schedule(self._world.now(), TIMER, entry.done)
            entry.done = None
        if domain.running:
            self._arm(domain)
        else:
            self._domains.remove(domain)


class _Domain:
    """Domain: patterns that share links, from the first beginning to the last end; see Note [Domains]."""

    def __init__(self, root: _MemoNode, history: list[_Entry], topology: Topology) -> None:
        self.history: list[_Entry] = []
        self.running: dict[int, _Entry] = {}
        self.asked = 0
        self._moment = root
        self._origin = history[0].began
        self._consumed = 0
        self._topology = topology
        self._fidelity = history[0].pattern.fidelity
        self._carrier: NetworkSimulator | None = None
        self._handles: list[ProgramHandle] = []
        for entry in history:
            self.add(entry)

    def meets(self, links: int) -> bool:
        """Return whether something under way uses one of ``links``."""
        return any(entry.pattern.links & links for entry in self.running.values())

    def add(self, entry: _Entry) -> None:
        """Begin ``entry``."""
        when = entry.began - self._origin
        self._moment = self._moment.after.setdefault((when, entry.pattern), _MemoNode())
        self._consumed = 0
        if entry.done is not None:
            self.running[len(self.history)] = entry
        self.history.append(entry)
        if entry.pattern.fidelity.level != self._fidelity.level == "packet":
            # What is too large for packets is a fluid, and so is what it meets, from the beginning.
            self._fidelity, self._carrier = entry.pattern.fidelity, None
        elif self._carrier is not None:
            self._load(self._carrier, entry)

    def next(self) -> Time:
        """Return when the next pattern completes if no other begins before."""
        known = self._moment.ends
        if self._consumed < len(known):
            return self._origin + known[self._consumed][0]
        if len(self.history) == 1:
            known.append((self.history[0].pattern.alone, (0,)))
        else:
            network = self._simulated()
            over = [end for index in self.running if (end := self._handles[index].end) is not None]
            when = min(over) if over else network.next_completion()
            assert when is not None
            known.append((when, None))
        return self.next()

    def completed(self, now: Time) -> list[_Entry]:
        """Return the patterns that have just completed, at `next`."""
        when, over = self._moment.ends[self._consumed]
        if over is None:
            self._simulated().advance(now - self._origin)
            over = tuple(index for index in self.running if self._handles[index].end is not None)
            self._moment.ends[self._consumed] = when, over
        self._consumed += 1
        return [self.running.pop(index) for index in over]

    def _simulated(self) -> NetworkSimulator:
        """Return the simulator of all patterns of the domain, loaded on first use."""
        if self._carrier is None:
            self._carrier, self._handles = self._fidelity.carrier(self._topology), []
            for entry in self.history:
                self._load(self._carrier, entry)
        return self._carrier

    def _load(self, network: NetworkSimulator, entry: _Entry) -> None:
        program, when = entry.pattern.program, entry.began - self._origin
        assert program is not None
        shifted = dataclasses.replace(program, release=program.release + when)
        self._handles.append(network.add(shifted, when))
