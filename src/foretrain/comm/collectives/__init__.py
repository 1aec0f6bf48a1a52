"""All-reduce, reduce-scatter and all-gather of NumPy arrays between ranks, over authenticated TCP links.

    links = connect_peers(host, exchange, secret, rank, ranks, timeout=60)
    with closing(RingCollectives(links, rank, ranks)) as collectives:
        work = collectives.all_reduce(gradients)
        ...
        work.wait()

Modules: `plan` says who sends what to whom, ring.cpp does it, `runners` compile that or do it in NumPy, and `ring` owns
the sockets and the thread. `executor` issues chunks in the order that all ranks agreed on, over these collectives or a
framework's. No framework is needed.
"""

from foretrain.comm.collectives.ring import RingCollectives, connect_peers

__all__ = ["RingCollectives", "connect_peers"]
