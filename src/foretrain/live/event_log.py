"""The log a rank sends and the answers it gets: fixed-size records, little-endian, over one socket pair per rank.

A rank writes *frames*: a header, its records, and the records' payloads in their order. Times are picoseconds since the
rank began, sizes bytes. Streams are numbered per rank, ``device << 16 | stream``; stream 0 of a device is its default.
*Events* are numbered per rank from 1, each number recorded once: a CUDA event recorded again gets a new number. The end
of a collective is an event as well.

The same layout is in ``live/device/native/wire.hpp``.

Records and the meaning of their fields (unnamed fields are 0):

=============  ====================================================================================================
``RUN``        Kernels one behind the other on ``stream``: ``a`` work, the sum of their durations; ``b`` floor, the
               earliest end given when the host launched them, max over kernels i of launch_i + what remains from i on;
               ``c`` what of ``a`` copy engines do; ``extra`` kernels. Begun at s they end at max(s + a, b). Payload:
               while tracing, `KERNEL` each.
``RECORD``     Event ``a`` happens when ``stream`` gets here, at ``host`` at the earliest.
``WAIT``       ``stream`` goes on when event ``a`` has happened.
``COLLECTIVE`` Operation ``code`` (`OPERATIONS`) in group ``b`` on ``stream``, whose end is event ``a``; ``c`` bytes:
               the whole vector, that is the input of a reduce-scatter, the output of an all-gather, all inputs of one
               rank of an all-to-all. ``extra`` is the root's rank in the group. It begins when ``stream`` gets there,
               at ``host`` at the earliest, on all members. Members call the collectives of a group in the same order.
               Payload: this rank's contribution where its values are known, and a last byte: 1 if they are real.
``MESSAGE``    To (``code`` 0) or from (1) rank ``extra`` of group ``b``: ``c`` bytes, end is event ``a``. Messages
               between two ranks of a group match in their order. With ``flag`` 1 more of the same NCCL group follow:
               they proceed together, and the stream goes on when all are done. Payload as above.
``SPLITS``     Payload: int64 bytes that the next all-to-all sends to each rank of its group, where they differ.
``GROUP``      Group ``a`` exists. Payload: int32 world ranks in the group's order. ``b`` is the number of its family:
               the groups that the script made in one go, e.g. all rows of a device mesh. Also sent for groups this
               rank is no member of, since they tell which ranks are alike. Group 0, the world, exists from the start.
``ASK``        The rank stops until it is answered; last of its frame. ``code`` says what for (`QUESTIONS`).
``FORGET``     Payload: int64 events that nobody refers to any more.
``NOTE``       Entry of the rank's trace: ``code`` of `NOTES`, ``a`` and ``b``, payload as the note says.
``TASKS``      A policy exchanges gradients from here on, as exchange ``a`` of this rank; ``stream`` is where that is
               shown. Payload: JSON, `foretrain.live.event_log.ModelAnnouncement`.
``BEGIN``      ``stream`` comes to the first gradient of another round of exchange ``b``, at ``host`` at the earliest.
``READY``      Task ``extra`` of exchange ``b`` is ready when ``stream`` gets here, at ``host`` at the earliest. Event
               ``a`` happens when all of its bytes are summed and back on all ranks.
=============  ====================================================================================================
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final, NamedTuple

import msgspec

from foretrain.comm.observation import StepProfile
from foretrain.units import Time

RUN: Final = 1
RECORD: Final = 2
WAIT: Final = 3
COLLECTIVE: Final = 4
MESSAGE: Final = 5
SPLITS: Final = 6
GROUP: Final = 7
ASK: Final = 8
FORGET: Final = 9
NOTE: Final = 10
TASKS: Final = 11
BEGIN: Final = 12
READY: Final = 13

OPERATIONS: Final = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "broadcast",
    "reduce",
    "all_to_all",
    "gather",
    "scatter",
    "barrier",
)
"""The collectives by code."""

STREAM: Final = 0
"""Question: when is all work on ``stream`` done? Answer: that time, or ``host`` if it was done before."""
DEVICE: Final = 1
"""Question: when is all work on all streams of device ``stream >> 16`` done? Answer as for `STREAM`."""
EVENT: Final = 2
"""Question: when has event ``a`` happened? Answered with ``host`` if before."""
QUERY_STREAM: Final = 3
"""Question: is all work on ``stream`` done at ``host``? Answer: `Answer.value` 1 or 0."""
QUERY_EVENT: Final = 4
"""Question: has event ``a`` happened at ``host``?"""
ELAPSED: Final = 5
"""Question: how long from event ``a`` to event ``b``, both over? Answer: ``value`` in ps; blocks until both are."""
VALUES: Final = 6
"""Question: what did the members contribute to the collective or message whose end is event ``a``? Takes no virtual
time. Payload of the answer: `CONTRIBUTION` and the bytes for each live member, in the group's order; empty if a member
contributed nothing, for then the result is not real. Where live members do not just stand for those behind them, first
one that stands for 0 members, with int32 for each member: the rank in the group of who stands for it."""
LEAVE: Final = 7
"""Question: may the rank end? Answered at once; ``a`` its exit status. The last frame of a rank that ends well."""
ROOM: Final = 8
"""Question: as `EVENT`, for the host cannot launch more on ``stream`` before; ``value`` is when it has happened."""
QUESTIONS: Final = ("stream", "device", "event", "query stream", "query event", "elapsed", "values", "leave", "room")

STEP: Final = 0
"""Note: the optimizer has finished step ``a``; event ``b`` was recorded behind it."""
MEMORY: Final = 1
"""Note: payload JSON, peak of memory with its breakdown."""
WARNING: Final = 2
"""Note: payload text, for the user."""
ANNOTATION: Final = 3
"""Note: a range that the script has named begins (``a`` 1) or ends (``a`` 0) at ``host``; payload its name. ``b`` is
the number of the host's thread, 0 the script's own; ranges of a thread are nested."""
COST: Final = 4
"""Note: payload JSON, predicted time of step ``a``'s kernels by provenance, and the operators unknown until then."""
NAME: Final = 5
"""Note: number ``a`` stands for the kernel name in the payload."""
RANK: Final = 6
"""Note: the script of a fake world says that it is rank ``a``; the process ends, for one that is."""
GATHERED: Final = 7
"""Note: payload JSON, the script's line that gathers objects, and the world ranks that they are gathered of."""
SINGLED_OUT: Final = 8
"""Note: the script does something on rank ``a`` alone; payload the line that asks which rank it is."""
EXPERTS: Final = 9
"""Note: loads of experts do not fit the script; payload JSON, the arguments of the ConfigError."""
LOADS: Final = 10
"""Note: router ``a`` of the rank, from 0, has drawn loads for a step; payload: the busiest expert's over the mean."""
CHECKPOINT: Final = 11
"""Note: a save that began when the host's clock was ``a`` is over; event ``b`` was recorded before it. Payload JSON:
the function, the script's line, and bytes by number of parts; see Note [Shares of a checkpoint] in
`foretrain.live.device.checkpoints`."""
STAND_IN: Final = 12
"""Note: the script has imported a stand-in for the library in the payload, which is not installed."""
NO_FILE: Final = 13
"""Note: the script failed as there is no file with the path in the payload."""
NO_CODE: Final = 14
"""Note: the script failed as it is no Python, or imports what is not there."""
NOTES: Final = (
    "step", "memory", "warning", "annotation", "cost", "name",
    "rank", "gathered", "singled out", "experts", "loads", "checkpoint", "stand-in", "no file", "no code",
)  # fmt: skip

HEADER: Final = struct.Struct("<IIqII")
"""Records, bytes of payload, the host's clock, state (`RUNNING`, `ASKING`), and 0."""
RECORD_LAYOUT: Final = struct.Struct("<BBHiqqqqII")
"""kind, flag, code, stream, a, b, c, host, payload bytes, extra: 48 bytes."""
KERNEL: Final = struct.Struct("<iIqq")
"""Of a traced kernel: number of its name, provenance, launch time, duration."""
CONTRIBUTION: Final = struct.Struct("<III")
"""Rank in the group, how many members it stands for, bytes."""
ANSWER: Final = struct.Struct("<IIqq")
"""Status (0 good, 1 an error whose text is the payload), payload bytes, time, value."""

RUNNING: Final = 0
ASKING: Final = 1


class LogRecord(NamedTuple):
    """Record of a rank's log."""

    kind: int
    flag: int
    code: int
    stream: int
    a: int
    b: int
    c: int
    host: Time
    extra: int
    payload: bytes


class Frame(NamedTuple):
    """Records that a rank sent together.

    Attributes:
        entries: its records.
        host: the rank's clock when it sent them.
        asking: whether it now waits for an answer to the last.
    """

    entries: list[LogRecord]
    host: Time
    asking: bool


def frames(buffer: bytearray) -> Iterator[Frame]:
    """Take the complete frames off the front of ``buffer``."""
    while len(buffer) >= HEADER.size:
        records, blob, host, state, _ = HEADER.unpack_from(buffer)
        body = HEADER.size + records * RECORD_LAYOUT.size
        if len(buffer) < body + blob:
            return
        frame = bytes(buffer[: body + blob])
        del buffer[: body + blob]
        yield Frame(list(_entries(frame, body)), host, state == ASKING)


def _entries(frame: bytes, at: int) -> Iterator[LogRecord]:
    """Return the records of a frame whose payloads begin ``at``."""
    for kind, flag, code, stream, a, b, c, host, size, extra in RECORD_LAYOUT.iter_unpack(frame[HEADER.size : at]):
        yield LogRecord(kind, flag, code, stream, a, b, c, host, extra, frame[at : at + size] if size else b"")
        at += size


def answer(time: Time = 0, value: int = 0, payload: bytes = b"", *, failed: bool = False) -> bytes:
    """Return the bytes of an answer."""
    return ANSWER.pack(1 if failed else 0, len(payload), time, value) + payload


class ModelAnnouncement(msgspec.Struct, frozen=True):
    """Payload of a record ``TASKS``; see `foretrain.live.event_log`.

    Attributes:
        model: its class, for people.
        schedule: policy and knobs, as `foretrain.schedule.spec` reads it.
        ranks: of the world, among which gradients are summed, in the group's order.
        names: of the parameters, by task.
        sizes: bytes, by task.
        seen: profile of the steps that this rank has observed.
    """

    model: str
    schedule: str
    ranks: tuple[int, ...]
    names: tuple[str, ...]
    sizes: tuple[int, ...]
    seen: StepProfile

    def encode(self) -> bytes:
        """Encode for `decode`, in another process."""
        return msgspec.json.encode(self)

    @staticmethod
    def decode(payload: bytes) -> ModelAnnouncement:
        """Decode the output of `encode`."""
        return msgspec.json.decode(payload, type=ModelAnnouncement)
