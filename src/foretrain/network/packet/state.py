"""Memory of the packet kernels: one array of int64 for packets, ports, flows and everything else.

Objects are rows of that memory and are known by their addresses: ``m[p + TIME]`` is when packet ``p`` arrives, and
``x[f + WINDOW]`` the window of flow ``f``, where ``x`` is the same memory read as float64. Scalars are at its start. So
a kernel hands two arrays on, not forty, which is a third of its time and most of the time that it takes to compile.

A *port* is the output queue of a directed link, its sender and its wire. A packet is in one list at a time: of those on
the wire, by the window in which they arrive; of those that arrive at a port or host in this window; of a queue; of the
outbox of a host; or free.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

CLASSES = 8
"""Priority classes of a port; 0 goes first."""

# ── Columns of a packet: 64 bytes, a line of the cache ──
TIME, NEXT, WORD, WAY, SEQUENCE, INFO, STAMP, TIE = range(8)
PACKET_COLUMNS = 8
"""TIME: when it arrives where it is going next, ps. NEXT: in its list. WORD: see below. WAY: flow · 2^32 + where its
next hop is. SEQUENCE: its number in its flow. INFO: what a reply says. STAMP: when the sender let go of it, which
replies repeat. TIE: who is first of those that arrive at one instant."""

# ── A packet's word: 16 bits of size, 3 of class, flags, 4 of kind, 16 of the way it takes ──
SIZE_MASK = 0xFFFF
CLASS_SHIFT = 16
CLASS_MASK = 7
ECT = 1 << 19
"""Congestion may be marked on it. What is not is dropped where a queue is selective."""
MARKED = 1 << 20
"""Congestion was met (CE)."""
CUT = 1 << 21
"""Its data did not fit; this is its header."""
KIND_SHIFT = 24
KIND_MASK = 15
ROUTE_SHIFT = 32
ROUTE_MASK = 0xFFFF
DATA, ACK, NACK, PULL, NOTICE, PROBE, STOP, MAP = range(8)
LAST_CROSSING = MAP
"""Those cross the network. DATA and PROBE go to the receiver, the others to the sender: this has come; this has not;
one more may go; congestion was met; enough has come; this is missing."""
START, NEWS, ALARM, LOCAL, PACE, DRAW, RESUME, PAUSE = range(8, 16)
"""Events: steps of a flow may go; another host's flow has ended a step; a flow's timer; a step that crosses no link has
ended; a flow's rate allows the next packet; a host may pull one; a port may send a class, or may not."""

# ── Ties: what arrives comes by link, then a host's or port's own events, then NEWS, then what a host sends ──
OWN = 1 << 50
TOLD = 1 << 59
SENT = 1 << 60

# ── Columns of a port ──
BUSY, RATE, DELAY, ARRIVALS, ACTIVE, MASK, TOTAL, TURN = range(8)
HEAD, TAIL, BYTES = 8, 9, 10
"""Of class 0; each class has three columns."""
DEFICIT = 32
"""Of class 0; each class has one."""
SETTING, SEEN, SENT_ON, LOSES, BEGINS, ENDS, LOSES_IN_BURST, IN_BURST = range(40, 48)
HELD = 48
"""Of class 0; each class has one."""
PAUSED, ASKED, NODE, COUPLED, NUMBER = range(56, 61)
TALLY = 64
PORT_COLUMNS = 128
"""BUSY: until when it sends. RATE: ps per byte in 2^-16. DELAY: of the wire and the node behind it. ARRIVALS: the list
of this window. ACTIVE: whether it is among those to look at. MASK: which classes have packets. TOTAL: bytes in all
queues. TURN: the class whose turn it is, among those that take turns. SETTING: its row. SEEN, SENT_ON: packets that
were put into queues, and that went. LOSES: the 2^-32 of them that the wire loses; BEGINS, ENDS, LOSES_IN_BURST,
IN_BURST: of the packets after which a burst of losses begins and ends, that are lost in one, and whether there is
one (Gilbert and Elliott). HELD: bytes that came over this link and wait in the node behind it. PAUSED: classes that
may not be sent; ASKED: classes whose sender, the node before this link, was asked to pause. NODE: whose port it is.
COUPLED: whether ports of that node influence each other. NUMBER: the link's. TALLY: counts of class 0; each class
has eight."""

# ── Columns of a setting ──
STRICT, ROOM, MARK_CHANCE, NEAREST, SHARED, CUT_TO = range(6)
LIMIT, MARK_FROM, MARK_TO, SPARE, QUANTUM, XOFF, XON, SHARE = range(8, 72, 8)
SETTING_COLUMNS = 72
"""STRICT: how many classes are served before all others, in order; the others take turns. ROOM: bytes that all may
hold. MARK_CHANCE: 2^-32 of packets that are marked just below MARK_TO. NEAREST: whether what is nearest to its end
goes first and what is furthest from it is dropped (pFabric). SHARED: bytes that all ports of a node may hold.
CUT_TO: bytes to which data is cut that finds no room, or 0. Of each class: LIMIT: bytes that it may hold; MARK_FROM,
MARK_TO: bytes of it between which marking sets in; SPARE: bytes of it above which data that is not ECT is dropped;
QUANTUM: bytes that it may send when its turn comes; XOFF, XON: bytes from one link above which its sender is paused,
and down to which until it may go on; SHARE: 2^-8 of what is left of SHARED that it may hold."""

# ── Counts of each class of a port ──
PACKETS_OUT, BYTES_OUT, DROPPED, DROPPED_BYTES, MARKS, DEEPEST, LOST, CUT_DOWN = range(8)
COUNT_COLUMNS = 8
"""DEEPEST: the most bytes there were. CUT_DOWN: packets that lost their data for lack of room."""

# ── Columns of a node ──
POOL, WAITING, COMING, STIRRED, PULL_FIRST, PULL_LAST, PULL_FREE, PULLING, FIRST_PORT, LAST_PORT = range(10)
NODE_COLUMNS = 16
"""POOL, WAITING: bytes and packets that its ports hold. COMING: the list of this window, of a host or coupled node.
STIRRED: whether it is among those to look at. PULL_FIRST, PULL_LAST: of the flows that it wants to pull from;
PULL_FREE: when it may; PULLING: whether that event is under way. FIRST_PORT, LAST_PORT: where its ports are listed."""

# ── Columns of a flow ──
(
    PROTOCOL, SOURCE, TARGET, PATHS, PATH_COUNT, ACK_PATH, PACKETS, FULL, LAST_SIZE, STEPS, ALLOWED, FIRST_UNKNOWN,
    NEXT_NEW, TOP, DUE, ALARM_AT,
    # of the receiver
    DONE, EXPECTED, BITS, NACKED, NOTICED, PULLS, PULL_NEXT, FIRST_STEP,
    # of the sender
    DUPLICATES, RECOVER, PHASE, BACKOFF, WINDOW_END, ACKED, ACKED_MARKED, UNDER_WAY, CREDIT, AGAIN, AGAIN_FROM, PACING,
    NEXT_SEND, CLOSED, ROUND, TRIES, AVOID, SPREAD, STAGE_TIME, STAGE_BYTES, DECAYED_AT, RAISED_AT, BYTES_SINCE,
    # of both
    OWN_CLASS, TRANSPORT, BEGUN, END, SENT_PACKETS, SENT_AGAIN, TIMEOUTS, OVERHEAD, RELEASE, LAST_RATE, NEED,
    FLOW_NUMBER, KNOWN, VITAL, FIRST_DEPENDENCY, LAST_DEPENDENCY, FIRST_DEPENDENT, LAST_DEPENDENT, HEARD_OF, PROGRAM,
    WHOLE,
) = range(68)  # fmt: skip
"""PROTOCOL: of its transport. PATHS, PATH_COUNT: where its paths are listed and how many it has; ACK_PATH: where the
path of its replies begins. PACKETS: of a step; FULL, LAST_SIZE: of them and of the last one on the wire. ALLOWED:
steps that may go, -1 before its release. FIRST_UNKNOWN: the first packet that is not acknowledged; NEXT_NEW: the
next to go; TOP: the first that never went. DUE: when the timer is; ALARM_AT: when it is looked at, -1 for never.

DONE: steps that have come. EXPECTED: the first packet that has not. BITS, KNOWN, VITAL: the numbers of its first bits
of what has come, of what its sender knows (see its transport), and of what is protected, or -1. NACKED: the packet that
was last asked for; NOTICED: when it was last told of congestion. PULLS: packets that it shall be pulled for; PULL_NEXT:
the next such flow. FIRST_STEP: its first row among steps. NEED: bytes of a step that are enough.

DUPLICATES, RECOVER, PHASE, BACKOFF: of a recovery. WINDOW_END, ACKED, ACKED_MARKED: of a round trip. UNDER_WAY:
packets. CREDIT: packets that may go. AGAIN: packets that have to go again; AGAIN_FROM: none before it has. PACING:
whether the event for the next packet is under way; NEXT_SEND: when one may go. CLOSED: steps that need nothing more;
ROUND: of probes; TRIES: of them in a row. AVOID: bits of ways that met congestion; SPREAD: packets that chose a way.
HEARD_OF: how many of SENT_PACKETS are under way no more. STAGE_*, *_AT, BYTES_SINCE: of DCQCN. BEGUN: when its first
packet went; END: when its last step had come. OVERHEAD: ps from when a step may go to when it does. RELEASE: ps before
which none may. LAST_RATE: of the last link, as RATE. FIRST_DEPENDENCY, LAST_DEPENDENCY: its dependencies;
FIRST_DEPENDENT, LAST_DEPENDENT: where its dependents are listed. PROGRAM: whose it is. WHOLE: whether losses are
bounded, and no full packet of a step may be lost."""

OPEN_FLOWS = 0
PROGRAM_COLUMNS = 8
"""Of a program: how many of its flows have not ended; 0 or less where nobody asks."""

GOT, STOPPED, MISSING = range(3)
STEP_COLUMNS = 4
"""Of a step of a flow with bounded loss: bytes that have come; whether its sender knows that they are enough; packets
that its receiver last said are missing."""

WINDOW, THRESHOLD, ALPHA, SMOOTHED, VARIATION, PACE_RATE, AIM, PEAK, LAST_TRIP, GRADIENT = range(72, 82)
FLOW_COLUMNS = 88
"""In float64: packets that may be under way; the window above which it grows by one a round trip; DCTCP's and DCQCN's
α; the smoothed round trip and its mean deviation, ps; the rate, the one it is to come back to, and that of the
slowest link, bytes/ps; TIMELY's last round trip and the smoothed difference of two, ps."""

WAITED, LAG, SEEN_STEPS, WAITER = range(4)
DEPENDENCY_COLUMNS = 4
"""Of a dependency: the flow that is waited for, how far it must be ahead, how many of its steps are known to have come,
and who waits."""

# ── Columns of a transport's parameters, float64 ──
FIRST_WINDOW, MOST, LEAST_TIMEOUT, MOST_TIMEOUT, REORDERING, GAIN, REPLY_SIZE, DEMOTIONS = range(8)
DEMOTED_FROM = 8
MARKABLE, ADAPTIVE, LEAST_CLASS, IMPORTANT, MOST_TRIES, LAW, TOLERATED, INSISTENT = range(17, 25)
LAWS = 25
PARAMETER_COLUMNS = 40
"""FIRST_WINDOW, MOST: packets. *_TIMEOUT: ps. REORDERING: duplicates that mean a loss. GAIN: of α. REPLY_SIZE: bytes on
the wire. DEMOTIONS: how often a step's packets go down a class (PIAS); DEMOTED_FROM: from which packet of the step
on, ascending (7). MARKABLE: whether data is ECT. ADAPTIVE: whether ways that met congestion are avoided.
LEAST_CLASS: of data. IMPORTANT: 2^-32 of packets that are protected. MOST_TRIES: probes in a row. TOLERATED: the
share that may be lost. INSISTENT: whether what goes again is protected. LAW: what sets the rate; LAWS: its
parameters, see its file."""

WINDOWED, NEAREST_FIRST, PULLED, IN_ORDER, BOUNDED, SILENT = range(6)
"""Protocols: see `foretrain.network.packet.host_rx`. SILENT: of what was cancelled."""

# ── Scalars ──
(
    NOW, FREE, FREES, FLYING, FAR, ACTIVES, HOSTS, PHASE_OF_WINDOW, AT_HOST, AT_EVENT, EVENTS, SHIFT, HOPS, DATA_HOPS,
    STAMPS, OUT, LAST_OUT, UNFINISHED, LAST_TIME, MARGIN, ARRIVED, QUEUED_EVENTS, SEED, DROPS, LOSSES, CUTS, PAUSES,
    TRACE_EVERY, TRACED, LAST_TRACE, ASKING, SWITCHES, AT_SWITCH, STIRRED_STILL, ACTIVE_LIST, HOST_LIST, SWITCH_LIST,
    FIRST_FLOW, LAST_FLOW, WATCHED, LAST_WATCHED, UNTIL, COMPLETED,
) = range(43)  # fmt: skip
WHEEL_AT = 64
"""NOW: the window (its number), or the time of the heap. FREE: the first free packet; FREES: how many. FLYING: packets
in the wheel; FAR: beyond it. ACTIVES, HOSTS, SWITCHES: how many ports, hosts and coupled nodes of this window there
are in ACTIVE_LIST, HOST_LIST and SWITCH_LIST. PHASE_OF_WINDOW, AT_HOST, AT_EVENT, EVENTS, AT_SWITCH: where to go on;
STIRRED_STILL: coupled nodes that stay. STAMPS: packets that hosts have sent, which orders them. OUT, LAST_OUT: the
list of what a host has made. SHIFT: a window is 2^SHIFT ps. MARGIN: free packets that one event of a host may need.
TRACE_EVERY: windows between two looks at queues, 0 for none; TRACED: rows of them; LAST_TRACE: the number of the
last one. ASKING: a PAUSE or RESUME that a port has made and nobody has taken over yet, or -1. FIRST_FLOW, LAST_FLOW:
where flows are that are to be loaded. WATCHED, LAST_WATCHED: where the ports are listed whose queues are traced.
UNTIL: nothing from this time on happens, ps. COMPLETED: programs that have completed and of which nobody knows.
WHEEL_AT: where the wheel is."""
FOREVER = 1 << 62

DONE_ALL, GROW, BREATH, STUCK, THERE = range(5)
"""Why a kernel returns: all flows have ended; more packets are needed; it is time for a look at signals, or a program
has completed; nothing is under way though flows have not ended; nothing is left to happen before UNTIL."""

WHEEL = 4096
"""Windows that the wheel reaches ahead."""


@dataclass(slots=True, eq=False)
class PacketState:
    """State of one simulation.

    Attributes:
        memory: int64, everything.
        far: a heap of packets that arrive beyond the wheel.
        buffer: packets of a port or host in this window, in order, twice as long as there are packets.
        event: of the heap twin: time, order, what.
        trace: (samples, 1 + watched): the number of the sample, and the bytes of each port.
        pools: where packets are: the first one, and how many.
    """

    memory: NDArray[np.int64]
    far: NDArray[np.int64]
    buffer: NDArray[np.int64]
    event: NDArray[np.int64]
    trace: NDArray[np.int64]
    pools: tuple[tuple[int, int], ...] = ()

    @property
    def real(self) -> NDArray[np.float64]:
        """Return the memory, read as float64."""
        return self.memory.view(np.float64)

    def copy(self) -> PacketState:
        """Return an independent copy."""
        copies = (array.copy() for array in (self.memory, self.far, self.buffer, self.event, self.trace))
        return PacketState(*copies, pools=self.pools)

    def rows(self, first: int, columns: int, count: int) -> NDArray[np.int64]:
        """Return a view of ``count`` rows from ``first`` on, (count, columns)."""
        return self.memory[first : first + count * columns].reshape(count, columns)
