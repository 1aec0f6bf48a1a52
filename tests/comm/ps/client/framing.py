"""Oracle of what wire.cpp makes of pushes: the messages with what of some ranges is on a shard."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

from foretrain.comm.ps.client.push_log import PushedRange
from foretrain.comm.ps.frames import SMALL, FrameKind, Header, Item, bundle
from foretrain.comm.ps.placement import Placement
from foretrain.comm.ps.wire import SPAN
from foretrain.network.switch_cluster import MESSAGE
from foretrain.tasks import Piece


def framed(
    placement: Placement, shard: int, step: int, flag: int, spans: bytes
) -> Iterator[tuple[Header, tuple, list[PushedRange]]]:
    """Header, pieces of the payload, and ranges of each message; small ranges share one."""
    header = Header(FrameKind.PUSH, flag, step=step)
    small: list[tuple[PushedRange, Item]] = []
    for task, start, end, where in SPAN.iter_unpack(spans):
        size = end - start
        data = memoryview((ctypes.c_char * size).from_address(where)).cast("B") if where else memoryview(b"")
        for part, offset, count in placement.of(Piece(task, start, size)):
            low = part.offset + offset
            item = Item(part.number, offset, count, data[low - start : low - start + count])
            pushed = PushedRange(task, low, low + count), item
            if part.shard != shard:
                continue
            if count > SMALL:
                yield *bundle(header, [item]), [pushed[0]]
                continue
            small.append(pushed)
            if sum(item.size for _, item in small) > MESSAGE - SMALL:
                yield *bundle(header, [item for _, item in small]), [range_ for range_, _ in small]
                small.clear()
    if small:
        yield *bundle(header, [item for _, item in small]), [range_ for range_, _ in small]
