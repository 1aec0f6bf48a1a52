"""Gradients over a parameter server: each worker has an engine of its own.

    Scheduled (training thread) ──▶ `exchange`: Engine ──▶ `staging` ── PUSH ──▶ foretrain.server
                 Updates ◀── landed ──  `flights`  ◀── VALUE ──────────────────────────┘

Nobody waits for an order: what is ready here is pushed as this worker's policy decides, and a server sums what all
have pushed. Links are two, one in each direction.
"""
