"""Parameter server: shards that sum what workers push, or update parameters with it.

    worker's engine ── PUSH ──▶ `service` ──▶ `job` ──▶ `shard`: `coverage`, `sums` ──▶ `peers` ── VALUE ──▶ workers
                                                └──▶ optimizer shard: `sums`, `consistency` ──┘

`frames` defines the messages, `placement` the shard of each byte, `session` the handshake. `wire`, with wire.cpp and
gmac.h, carries messages and authenticates them. In `server`, `peers` admits workers and holds their send queues, `job`
is one job of several workers, `snapshots` keeps the state on disk, and `shard` is the interface of both kinds of
shards. In `client`, `connection` is a worker's end. Only `service`, `wire` and `connection` know connections, so that
the others are tested without one.
"""

from typing import Final

EVERY: Final = 10
"""Default rounds between two snapshots: workers keep the pushes of as many."""
