"""ZeroMQ's own handshake, which comes before anything that is said: nothing else is read of who lacks the job's secret.

A word made from the secret opens (ZMTP's PLAIN mechanism, asked for with ZAP, RFC 27): so no stranger can fill memory
with a message that never ends. The handshake itself has some seconds, and may be as large as a message. Whoever sees
the network sees the word; it opens this gate alone, and proves nothing to `foretrain.comm.ps.server.handshake`.
"""

from __future__ import annotations

import hmac
from typing import Any, Final

import zmq

_NAME: Final = b"foretrain"
_EVENTS: Final = "inproc://foretrain.gate"
_PATIENCE: Final = 5000
"""ms that somebody may take for this handshake."""
_SOME: Final = 64
"""Of those who come in one turn."""
_FAILED: Final = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
"""Those that another mechanism, or none, was tried in: wrong words are counted when they are heard."""


def _word(secret: bytes) -> bytes:
    return hmac.digest(secret, b"the gate of a server", "sha256").hex().encode()


def knock(socket: zmq.Socket[Any], secret: bytes) -> None:
    """Has a worker's ``socket`` say the word wherever it connects."""
    socket.setsockopt(zmq.PLAIN_USERNAME, _NAME)
    socket.setsockopt(zmq.PLAIN_PASSWORD, _word(secret))


class ZapAuth:
    """Of one server's socket, and alone in its context.

    Args:
        context: of ZeroMQ.
        secret: the job's.
        guarded: the socket, not yet bound.
    """

    def __init__(self, context: zmq.Context[Any], secret: bytes, guarded: zmq.Socket[Any]) -> None:
        self._word = _word(secret)
        self._guarded = guarded
        self._asked = context.socket(zmq.REP)
        self._asked.bind("inproc://zeromq.zap.01")
        guarded.setsockopt(zmq.PLAIN_SERVER, 1)
        guarded.setsockopt(zmq.ZAP_DOMAIN, _NAME)
        guarded.setsockopt(zmq.HANDSHAKE_IVL, _PATIENCE)
        guarded.monitor(_EVENTS, _FAILED)
        self._failed = context.socket(zmq.PAIR)
        # Whoever tells of events waits where they are not taken, and with it all traffic of the server.
        self._failed.setsockopt(zmq.RCVHWM, 0)
        self._failed.connect(_EVENTS)

    @property
    def sockets(self) -> tuple[zmq.Socket[Any], ...]:
        """Where something is to be `answer`ed when any of them has something."""
        return self._asked, self._failed

    def answer(self) -> list[str]:
        """Lets in and turns away some of those who have come; who was turned away, for people."""
        turned_away = []
        for _ in range(_SOME):
            if not self._failed.poll(0):
                break
            self._failed.recv_multipart()
            turned_away.append("somebody who is no worker, or one of another version")
        for _ in range(_SOME):
            if not self._asked.poll(0):
                break
            version, request, _, address, _, mechanism, *said = self._asked.recv_multipart()
            right = mechanism == b"PLAIN" and len(said) == 2 and hmac.compare_digest(said[1], self._word)
            if not right:
                turned_away.append(f"{address.decode(errors='replace')} does not know the job's secret")
            self._asked.send_multipart([version, request, b"200" if right else b"400", b"", b"", b""])
        return turned_away

    def close(self) -> None:
        """Before the guarded socket is closed."""
        self._guarded.disable_monitor()
        self._failed.close(0)
        self._asked.close(0)
