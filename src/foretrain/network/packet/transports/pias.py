"""PIAS (Bai et al., NSDI 2015): the more of a message has gone, the lower the class of its packets.

So short messages overtake long ones though nobody knows their sizes. Windows and marks are DCTCP's, in the file beside.
"""

from __future__ import annotations

from foretrain.network.packet import state as c
from foretrain.network.packet.jit import inside


@inside
def demoted(x, transport, of, place):
    """The class of the packet at ``place`` of a step that begins in class ``of``."""
    for k in range(int(x[transport + c.DEMOTIONS])):
        if place >= x[transport + c.DEMOTED_FROM + k] and of + 1 < c.CLASSES:
            of += 1
    return of
