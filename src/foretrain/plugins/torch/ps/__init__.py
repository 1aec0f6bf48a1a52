"""Gradients over a parameter server: each worker has an engine of its own.

    GradientDispatcher (training thread) ──▶ exchange: Engine ──▶ push log, `staging` ── PUSH ──▶ foretrain.comm.ps
                            updates ◀── landed ──  in-flight bytes  ◀── VALUE ─────────────────────────┘

If servers update, they send parameters instead of sums, and `remote_optimizer` holds their optimizers' settings.

There is no common order: each worker pushes as its own policy decides, and a server sums the pushes of all. After a
server was restarted, the push log resends the pushes that no snapshot holds.
"""
