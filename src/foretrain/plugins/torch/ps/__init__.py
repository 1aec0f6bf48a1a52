"""Gradients over a parameter server: each worker has an engine of its own.

    Scheduled (training thread) ──▶ `exchange`: Engine ──▶ `pushes`, `staging` ── PUSH ──▶ foretrain.comm.ps
                 Updates ◀── landed ──  `flights`  ◀── VALUE ───────────────────────────────────┘

Where servers update, parameters come back instead of sums: `remote` is what a worker knows of the optimizers there,
`stepping` what it refuses because of that, `errands` how their state goes there and back.

Nobody waits for an order: what is ready here is pushed as this worker's policy decides, and a server sums what all
have pushed. Links are two, one in each direction. `pushes` says again what a server that was started anew must know.
"""
