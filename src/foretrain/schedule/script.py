"""A schedule as data: every chunk in order, printed, parsed, validated, and run again in either world.

    all_reduce fc.weight[0:4000000]
    all_reduce fc.weight[4000000:8192000] + fc.bias
    all_reduce conv1.weight

One line a chunk, in the order of starting; a name without a range is the whole tensor; ``#`` begins a comment. Names
that contain spaces, ``[``, ``+`` or ``#`` are quoted as in JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, get_args

from foretrain.engine import Decision
from foretrain.errors import ScheduleError, unknown
from foretrain.schedule.job import Job, Knob
from foretrain.tasks import (
    AS_THEY_COME,
    Action,
    Chunk,
    Done,
    Event,
    Op,
    Piece,
    Priorities,
    Ready,
    Start,
    StepBegin,
    Task,
)
from foretrain.units import Time

_OPS: dict[str, Op] = {op: op for op in get_args(Op)}
_PIECE = re.compile(r'\s*("(?:[^"\\]|\\.)*"|[^\s\[+#"]+)\s*(?:\[\s*(\d+)\s*:\s*(\d+)\s*\])?\s*')
_PLAIN = re.compile(r'[^\s\[+#"]+')


def of_step(log: Iterable[Decision], step: int) -> tuple[Chunk, ...]:
    """Return the chunks started in one step, in order."""
    return tuple(decision.chunk for decision in log if decision.step == step)


def write(chunks: Iterable[Chunk], tasks: Sequence[Task]) -> str:
    """The schedule as text, one line a chunk."""
    return "".join(
        f"{chunk.op} {' + '.join(_write_piece(piece, tasks[piece.task]) for piece in chunk.pieces)}\n"
        for chunk in chunks
    )


def parse(text: str, tasks: Sequence[Task]) -> tuple[Chunk, ...]:
    """The schedule that ``text`` spells; ScheduleError names the line that does not read or breaks a rule."""
    by_name = {task.name: task for task in tasks}
    chunks = []
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip() and not line.lstrip().startswith("#"):
            chunks.append(_parse_line(line, number, by_name))
    return validate(chunks, tasks)


def validate(chunks: Iterable[Chunk], tasks: Sequence[Task]) -> tuple[Chunk, ...]:
    """``chunks``, if together they exchange every byte of every task exactly once; ScheduleError otherwise.

    A byte is exchanged by one all_reduce, or by one reduce_scatter and a later all_gather.
    """
    chunks = tuple(chunks)
    reduced: list[list[tuple[int, int]]] = [[] for _ in tasks]
    gathered: list[list[tuple[int, int]]] = [[] for _ in tasks]
    for chunk in chunks:
        for piece in chunk.pieces:
            span = (piece.offset, piece.offset + piece.size)
            if chunk.op != "all_gather":
                reduced[piece.task].append(span)
            if chunk.op == "all_gather" and not _covers(reduced[piece.task], span):
                raise ScheduleError(
                    f"task {tasks[piece.task].name!r}: bytes {span} are gathered before they are reduced"
                )
            if chunk.op != "reduce_scatter":
                gathered[piece.task].append(span)
    for task in tasks:
        _check_tiling(task, reduced[task.index], "reduced")
        _check_tiling(task, gathered[task.index], "sent back")
    return chunks


@dataclass(frozen=True, slots=True)
class Written:
    """A schedule as text, in the place of a policy: `simulate` takes it.

    Attributes:
        text: one step, chunk by chunk.
        barrier: whether the optimizer and the next forward pass wait until everything has landed.
        name: what to call it.
    """

    text: str
    barrier: bool = False
    name: str = "script"

    def build(self, job: Job) -> Script:
        """The policy; ScheduleError names the line that does not read or breaks a rule."""
        return Script(parse(self.text, job.tasks), job.tasks, barrier=self.barrier)

    def __str__(self) -> str:
        return self.name


class Script:
    """A policy that starts given chunks in their given order, each as soon as what it sends exists.

    On links that serve in order of starting this reproduces the schedule it was taken from, in either world.
    """

    knobs: ClassVar[tuple[Knob, ...]] = ()
    warmup: int = 0
    priorities: Priorities = AS_THEY_COME

    def __init__(self, chunks: Sequence[Chunk], tasks: Sequence[Task], *, barrier: bool = False) -> None:
        self.barrier: bool = barrier
        self._chunks = validate(chunks, tasks)
        self._count = len(tasks)
        self._reset()

    def handle(self, event: Event, now: Time) -> Sequence[Action]:
        """Start the chunks whose turn has come."""
        if type(event) is StepBegin:
            self._reset()
        elif type(event) is Ready:
            self._ready[event.task] = True
        elif type(event) is Done and event.chunk.op == "reduce_scatter":
            for piece in event.chunk.pieces:
                self._reduced[piece.task] += piece.size
        starts: list[Action] = []
        while self._next < len(self._chunks) and self._may_start(self._chunks[self._next]):
            chunk = self._chunks[self._next]
            if chunk.op == "all_gather":
                for piece in chunk.pieces:
                    self._reduced[piece.task] -= piece.size
            starts.append(Start(chunk))
            self._next += 1
        return starts

    def _reset(self) -> None:
        self._ready = [False] * self._count
        self._reduced = [0] * self._count
        self._next = 0

    def _may_start(self, chunk: Chunk) -> bool:
        if chunk.op == "all_gather":
            return all(self._reduced[piece.task] >= piece.size for piece in chunk.pieces)
        return all(self._ready[piece.task] for piece in chunk.pieces)


def _write_piece(piece: Piece, task: Task) -> str:
    name = task.name if _PLAIN.fullmatch(task.name) else json.dumps(task.name, ensure_ascii=not task.name.isprintable())
    whole = piece.offset == 0 and piece.size == task.size
    return name if whole else f"{name}[{piece.offset}:{piece.offset + piece.size}]"


def _parse_line(line: str, number: int, by_name: dict[str, Task]) -> Chunk:
    word, _, rest = line.strip().partition(" ")
    op = _OPS.get(word)
    if op is None:
        raise ScheduleError(f"line {number}: {unknown('operation', word, _OPS)}")
    pieces: list[Piece] = []
    place = 0
    while True:
        match = _PIECE.match(rest, place)
        if match is None:
            raise ScheduleError(f"line {number}: {rest[place:]!r} is not a tensor; write e.g. 'fc.weight[0:4000000]'")
        name = json.loads(match[1]) if match[1].startswith('"') else match[1]
        if name not in by_name:
            raise ScheduleError(f"line {number}: {unknown('tensor', name, by_name)}")
        task = by_name[name]
        start, stop = (int(match[2]), int(match[3])) if match[2] else (0, task.size)
        if not 0 <= start < stop <= task.size:
            raise ScheduleError(f"line {number}: {name!r} has bytes [0:{task.size}], not [{start}:{stop}]")
        pieces.append(Piece(task.index, start, stop - start))
        place = match.end()
        if place == len(rest) or rest[place] == "#":
            return Chunk(op, tuple(pieces), sum(piece.size for piece in pieces))
        if rest[place] != "+":
            raise ScheduleError(f"line {number}: {rest[place:]!r} follows a tensor; join tensors with '+'")
        place += 1


def _covers(spans: Iterable[tuple[int, int]], wanted: tuple[int, int]) -> bool:
    start, stop = wanted
    for low, high in sorted(spans):
        if low <= start < high:
            start = high
    return start >= stop


def _check_tiling(task: Task, spans: Iterable[tuple[int, int]], verb: str) -> None:
    end = 0
    for start, stop in sorted(spans):
        if start != end:
            what = f"bytes [{end}:{start}] are never {verb}" if start > end else f"byte {start} is {verb} twice"
            raise ScheduleError(f"task {task.name!r}: {what}")
        end = stop
    if end != task.size:
        raise ScheduleError(f"task {task.name!r}: bytes [{end}:{task.size}] are never {verb}")
