"""Live simulation: the unmodified training script on a simulated cluster.

# Note [Inside and outside]
A *rank* is a process that runs the script on a fake CUDA device (`foretrain.live.device`). It knows no time but its own
host clock: what it launches is only written down, stream by stream, in a log (`foretrain.live.event_log`) that goes
to the *executor* (this package) without waiting. The executor runs the streams of all ranks in one virtual world, lets
their collectives contend in the simulated network, and answers a rank that asks when something was finished. So a
rank blocks only where its script would: at a synchronisation, a copy to the host, a query.

# Note [Conservative time]
Virtual time never runs ahead of what a rank may still do: it advances to the least host clock of all ranks that are
running, and freely once all of them ask, have ended, or cannot be reached before. Nothing is ever rolled back, and
what happens depends on (time, rank, order in the rank's log) alone, so that two runs give the same timeline.
"""
