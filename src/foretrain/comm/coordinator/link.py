"""Link between two ranks: short framed messages over TCP.

`foretrain.comm.coordinator.handshake` makes links, after both ends have proved that they know the job's secret.

Note [One system call]. A thread that returns from a system call must win the interpreter lock back, which can take
milliseconds while another thread computes in Python. The usual poll-then-recv pays that twice. Sockets here stay
blocking with SO_RCVTIMEO and SO_SNDTIMEO, so that a wait, however long, is one call of recv or send.

Note [Echoes]. Where the network loses packets, a lone segment is missed only after 200 ms: nothing follows it whose
acknowledgement would say so (RFC 8985, section 7.2). On a link that expects losses an empty message follows each, in a
segment of its own, and a lost one goes again after a few round trips. Where both are lost, Linux from 6.15 on waits 10
ms if told to; acknowledgements must then not be delayed by the usual 40.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
import sys
import termios
import threading
import time
import weakref

import msgspec

from foretrain.errors import ConfigError, ForetrainError

BODY_LIMIT = 16 << 20
"""Bytes a message's body may have; a peer that announces more is not speaking this protocol."""
SEND_TIMEOUT = 30.0
"""Seconds a send waits at most for a peer that takes nothing."""
_HEADER = struct.Struct("<BBHII")
_pack, _unpack = _HEADER.pack, _HEADER.unpack_from
_HEADER_SIZE = _HEADER.size
_TIMEVAL = struct.Struct("@ll")
_READ_SIZE = 1 << 16
_TCP_RTO_MIN_US, _TCP_DELACK_MAX_US = 45, 46
"""Options of Linux's TCP that Python has no names for."""
_LEAST_TIMEOUT, _MOST_DELAY = 10_000, 4_000
"""µs, of a link that expects losses."""
_ECHO = 255
"""Kind of a message that only follows another; see Note [Echoes]."""
_URGENT = 34 << 2
"""Type of service: AF41. Where switches serve classes by priority, nobody waits for a decision behind bulk data."""


_open: weakref.WeakSet[Link] = weakref.WeakSet()
"""All links of this process."""


class LinkError(ForetrainError):
    """A link that cannot be made or has ended. ``peer`` is the rank at its other end, None if unknown.

    A link that has raised this is of no more use: `Link.close` it.
    """

    def __init__(self, message: str, peer: int | None = None) -> None:
        self.peer = peer
        super().__init__(message)


class LinkMessage(msgspec.Struct, frozen=True, gc=False):
    """Message of a link, which gives its fields no meaning.

    Attributes:
        kind: 0–254.
        flag: 0–255.
        value: 0–2³²−1.
        body: at most `BODY_LIMIT` bytes.
    """

    kind: int
    flag: int
    value: int
    body: bytes


def framed(kind: int, flag: int = 0, value: int = 0, body: bytes = b"") -> bytes:
    """Return a message as `Link.send_framed` takes it.

    Raises:
        ConfigError: a field does not fit in its place on the wire (see `LinkMessage`).
    """
    if len(body) > BODY_LIMIT:
        raise ConfigError("body", f"{len(body)} bytes", "is too large for one message", f"send ≤ {BODY_LIMIT}")
    if kind == _ECHO:
        raise ConfigError("kind", kind, "is the link's own", "send 0 to 254")
    try:
        return _pack(kind, flag, 0, value, len(body)) + body
    except struct.error as error:
        raise ConfigError("message", (kind, flag, value), f"does not fit ({error})", "see LinkMessage") from None


def set_service(connected: socket.socket, service: int) -> None:
    """Mark what ``connected`` sends with a type of service, DSCP and ECN; a kernel that refuses sends it unmarked."""
    with contextlib.suppress(OSError):
        if connected.family == socket.AF_INET6:
            connected.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_TCLASS, service)
        else:
            connected.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, service)


class Link:
    """Owner of one end of a connected, authenticated socket.

    Any threads may send; one thread at a time receives. Messages of one thread arrive in the order of its sends.

    Attributes:
        peer: the rank at the other end.
    """

    # Note [Closing from another thread]. A descriptor number is reused as soon as it is closed, so it must not be
    # closed under a thread that is about to wait on it. `shutdown` ends every wait; `close` then closes the descriptor
    # under both locks, which waiting threads have released. They are reentrant for the sake of signal handlers.

    def __init__(self, connected: socket.socket, peer: int, send_timeout: float = SEND_TIMEOUT) -> None:
        self.peer, self._echoes = peer, False
        self._socket = connected
        self._send_timeout = send_timeout
        self._send = connected.send
        self._sending, self._receiving = threading.RLock(), threading.RLock()
        self._partial = bytearray()
        self._needed = _HEADER_SIZE
        self._wait: float | None = None
        self._fault = ""
        connected.settimeout(None)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        set_service(connected, _URGENT)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(send_timeout / 2))  # twice, see _send_rest
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(None))
        _open.add(self)

    def fileno(self) -> int:
        """Return the descriptor for a selector: readable when `read` would return or raise; −1 once closed."""
        return self._socket.fileno()

    def expect_losses(self) -> None:
        """Repeat lost messages after ms rather than 200; see Note [Echoes]."""
        self._echoes = True
        for option, value in ((_TCP_RTO_MIN_US, _LEAST_TIMEOUT), (_TCP_DELACK_MAX_US, _MOST_DELAY)):
            with contextlib.suppress(OSError):  # an older kernel has the echoes alone
                self._socket.setsockopt(socket.IPPROTO_TCP, option, value)

    def send(self, kind: int, flag: int = 0, value: int = 0, body: bytes = b"") -> None:
        """Send one message; wait while the socket's buffer is full.

        Raises:
            LinkError: the link has ended, or the peer reads nothing, which ends the link at the latest one send
                timeout after the last byte it read and at the earliest after half of that.
            ConfigError: a field does not fit in its place on the wire (see `LinkMessage`); nothing was sent.
        """
        self.send_framed(framed(kind, flag, value, body))

    def send_framed(self, messages: bytes) -> None:
        """Send ``messages``, each of which `framed` has made, as one; errors are those of `send`."""
        with self._sending:
            if self._fault:
                raise self._over(self._fault)
            try:
                sent = self._send(messages)
            except BlockingIOError:
                sent = 0
            except OSError as error:
                raise self._over(self._fault or error.strerror or str(error)) from None
            if sent != len(messages):
                self._send_rest(messages, sent)
            elif self._echoes:
                self._send_echo()

    def receive(self, timeout: float | None) -> list[LinkMessage]:
        """Wait up to ``timeout`` seconds (None: forever) for a whole message and return all that are there.

        Returns:
            Messages in the order they were sent; none only when the timeout has passed.

        Raises:
            LinkError: the peer closed or reset the link, or sent what is no message; what came before is
                returned first.
        """
        with self._receiving:
            if timeout is None:
                while not (messages := self._pull(None)):
                    pass
                return messages
            deadline = time.monotonic() + timeout
            while not (messages := self._pull(timeout)):
                timeout = deadline - time.monotonic()
                if timeout <= 0:
                    break
            return messages

    def read(self) -> list[LinkMessage]:
        """Return the whole messages that have arrived, without waiting: for use with a selector.

        Raises:
            LinkError: as `receive`.
        """
        with self._receiving:
            return self._pull(0.0)

    def unread(self) -> int:
        """Return how many bytes have arrived that belong to no message returned so far."""
        waiting = bytearray(4)
        fcntl.ioctl(self._socket, termios.FIONREAD, waiting)
        return len(self._partial) + int.from_bytes(waiting, sys.byteorder)

    def shutdown(self) -> None:
        """End the link for both sides and wake threads and selectors that wait on it, but keep the descriptor."""
        self._fault = self._fault or "it was closed on this side"
        with contextlib.suppress(OSError):  # ENOTCONN, EBADF: it has ended already
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the link; from any thread, any number of times. A blocked `receive` or `send` raises `LinkError`.

        A selector silently forgets a closed descriptor: where another thread selects on it, `shutdown` first and let
        that thread close.
        """
        self.shutdown()
        with self._receiving, self._sending:  # See Note [Closing from another thread].
            self._socket.close()

    def detach(self) -> socket.socket:
        """Give the connected socket up to the caller, who closes it; the link is of no more use.

        Its timeouts in the kernel stay; see Note [One system call].

        Raises:
            LinkError: the link has ended, or bytes were read from it that belong to no message returned so far.
        """
        with self._receiving, self._sending:
            if self._fault or self._partial:
                raise self._over(self._fault or "its socket was asked for in the middle of a message")
            self._fault = "its socket was given up"
            _open.discard(self)
            return socket.socket(fileno=self._socket.detach())

    def _leave(self) -> None:
        """Give up the descriptor's copy in a forked child; the link itself stays the parent's."""
        self._fault = "it belongs to the process that was forked"
        # A thread that does not exist here may hold them.
        self._sending, self._receiving = threading.RLock(), threading.RLock()
        self._socket.close()

    def _send_echo(self) -> None:
        data = _pack(_ECHO, 0, 0, 0, 0)
        with contextlib.suppress(OSError):  # whoever has ended, or takes nothing, is found by the next message
            if 0 < (sent := self._socket.send(data, socket.MSG_DONTWAIT)) < len(data):
                self._send_rest(data, sent)

    def _send_rest(self, data: bytes, sent: int) -> None:
        """Continue a send that has waited half of the timeout: the peer may have stopped at its very beginning."""
        rest = memoryview(data)
        try:
            while sent < len(data):
                sent += self._send(rest[sent:])
        except BlockingIOError:
            self._end(f"the peer takes nothing (send timeout {self._send_timeout:g} s)")
            raise self._over(self._fault) from None
        except OSError as error:
            raise self._over(self._fault or error.strerror or str(error)) from None
        except BaseException:
            self._end("a message was interrupted half-way")  # the next one would be read as the rest of this
            raise

    def _pull(self, wait: float | None) -> list[LinkMessage]:
        """Call recv once, for at most ``wait`` seconds; return no message if none is whole after it."""
        if self._fault:
            raise self._over(self._fault)
        size = min(max(self._needed - len(self._partial), _READ_SIZE), 16 * _READ_SIZE)
        try:
            if wait is not None and wait <= 0:
                data = self._socket.recv(size, socket.MSG_DONTWAIT)
            else:
                if wait != self._wait:
                    self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(wait))
                    self._wait = wait
                data = self._socket.recv(size)
        except BlockingIOError:
            return []
        except OSError as error:
            raise self._over(error.strerror or str(error)) from None
        if not data:
            ended = "the peer ended it in the middle of a message" if self._partial else "the peer ended it"
            raise self._over(self._fault or ended)
        messages = self._parse(data)
        if self._fault and not messages:
            raise self._over(self._fault)
        return messages

    def _parse(self, data: bytes) -> list[LinkMessage]:
        """Cut received bytes into messages and keep the rest. Linear in the bytes, however small the parts."""
        if self._partial:
            self._partial += data
            if len(self._partial) < self._needed:
                return []
            data = bytes(self._partial)
        messages: list[LinkMessage] = []
        at, end = 0, len(data)
        self._needed = _HEADER_SIZE
        while end - at >= _HEADER_SIZE:
            kind, flag, zero, value, size = _unpack(data, at)
            if zero or size > BODY_LIMIT:
                self._end(f"the peer sent what is no message (it announced {size} bytes)")
                at = end
                break
            body = at + _HEADER_SIZE
            if body + size > end:
                self._needed = _HEADER_SIZE + size
                break
            if kind != _ECHO:
                messages.append(LinkMessage(kind, flag, value, data[body : body + size]))
            at = body + size
        self._partial = bytearray(data[at:])
        return messages

    def _end(self, why: str) -> None:
        self._fault = why
        self.shutdown()

    def _over(self, why: str) -> LinkError:
        return LinkError(f"the link to rank {self.peer} is closed: {why}; that rank's own output says more", self.peer)


def _timeval(seconds: float | None) -> bytes:
    """Return a kernel timeout; 0 would mean forever, so no wait is shorter than a microsecond."""
    if seconds is None or seconds > 1e9:
        return _TIMEVAL.pack(0, 0)
    return _TIMEVAL.pack(*divmod(max(1, round(seconds * 1e6)), 1_000_000))


# Note [Forked children]. A connection ends when its last descriptor is closed. The workers of a DataLoader are forked
# with copies of all of them and outlive a rank that is killed by seconds, for which its peers would believe it alive.
def _leave_all() -> None:
    for link in _open:
        link._leave()


os.register_at_fork(after_in_child=_leave_all)
