"""The parameter server: shards that sum what workers push, over ZeroMQ.

    worker's engine ── PUSH ──▶ `service` ──▶ `shard`: `coverage`, `sums` ──▶ `outbox` ── VALUE ──▶ every worker

`frames` is what is said, `sessions` who may say it, `placement` where each byte lives, `connection` a worker's end. The
shard itself knows no socket, so that what it must do is tested without one. pyzmq and cryptography are the extra
``foretrain[ps]``; only `service`, `connection` and `sessions` need them.
"""
