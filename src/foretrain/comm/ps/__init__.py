"""The parameter server: shards that sum what workers push, or update parameters with it, over ZeroMQ.

    worker's engine ── PUSH ──▶ `service` ──▶ `job` ──▶ `shard`: `coverage`, `sums` ──▶ `peers` ── VALUE ──▶ workers
                                                └──▶ optimizer shard: `sums`, `hyperparameters`, `consistency` ──┘

`frames` defines the messages, `placement` where each byte lives, `session` the authentication of messages. In `server`,
`handshake` admits workers, `peers` holds them and their send queues, `job` is what they have in common and how it ends,
`snapshots` what outlives a server, and `shard` the interface of both kinds of shards. In `client`, `connection` is a
worker's end. But for `service`, `session` and `connection` they know no socket, so that they are tested without one.
pyzmq and cryptography are the extra ``foretrain[ps]``.
"""

from typing import Final

EVERY: Final = 10
"""Rounds between two snapshots, unless somebody says other: workers keep what they push in them."""
