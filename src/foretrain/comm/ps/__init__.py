"""The parameter server: shards that sum what workers push, or update parameters with it, over ZeroMQ.

    worker's engine ── PUSH ──▶ `service` ──▶ `job` ──▶ `shard`: `coverage`, `sums` ──▶ `outbox` ── VALUE ──▶ workers
                                                └──▶ `updating`: `turns`, `rules`, `masters`, `staleness` ──┘

`frames` is what is said and `bundles` how several say it together, `sessions` who may say it, `gate` and `door` where
they begin, `peers` who is in, `job` what they have in common and how it ends, `placement` where each byte lives,
`halves` 16-bit numbers, `snapshots` what outlives a server, `connection` a worker's end; `modes` is what both kinds of
shards have in common. But for `service`, `gate` and `connection` they know no socket, so that what they must do is
tested without one. pyzmq and cryptography are the extra ``foretrain[ps]``; only those three, `job`, `peers`, `door` and
`sessions` need them.
"""

from typing import Final

EVERY: Final = 10
"""Rounds between two snapshots, unless somebody says other: workers keep what they push in them."""
