"""Gradients over a parameter server: each worker has an engine of its own.

    GradientDispatcher (training thread) ──▶ `exchange`: Engine ──▶ push log, `staging` ── PUSH ──▶ foretrain.comm.ps
                            updates ◀── landed ──  in-flight bytes  ◀── VALUE ─────────────────────────┘

Where servers update, parameters come back instead of sums: `remote_optimizer` is what a worker knows of the optimizers
there, and what it refuses because of that.

No worker waits for an order: each pushes as its own policy decides, and a server sums what all have pushed. Links are
two, one in each direction. After a server was restarted, the push log pushes again what it must know.
"""
