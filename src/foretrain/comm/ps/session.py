"""Authentication between workers and servers: a handshake with the job's secret, then a tag on every message.

    worker → server   HELLO    rank, 32-byte nonce C
    server → worker   CHALLENGE    32-byte nonce S
    worker → server   PROOF    HMAC-SHA256(secret, "worker" ‖ rank ‖ shard ‖ C ‖ S ‖ job), the job's name
    server → worker   WELCOME  HMAC-SHA256(secret, "server" ‖ rank ‖ shard ‖ C ‖ S)
            or        REFUSED  HMAC-SHA256(secret, "refusal" ‖ rank ‖ shard ‖ C ‖ S ‖ flag ‖ why), why
            or        STRANGER

As in `foretrain.comm.coordinator.handshake` the server proves itself last, so that an unauthenticated peer never gets a
MAC of its choosing; and who watches learns nothing that another handshake would accept, as each has nonces of its own.
Each direction of a connection has a key derived from both nonces, and every later message a tag: AES-128-GMAC over
prefix and payload, with the message's place in its direction as nonce. An altered, replayed, missing, reflected or
forged message has a wrong tag or place, and ends the connection. GMAC costs little where the machine multiplies
polynomials, so that it is not optional; nothing is encrypted.

A worker has two connections to each server, so that short urgent messages do not wait behind gradients. The second
one's handshake has the role "worker beside", and proves the nonces of the first in the place of the job's name.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from foretrain.comm.coordinator.handshake import NONCE_SIZE, PROOF_SIZE, proof

NAME_SIZE: Final = 64
"""Most bytes of a job's name, and the nonces of a session."""
REASON_SIZE: Final = 4000
"""Most bytes of a refusal's reason."""
HANDSHAKE_LIMIT: Final = PROOF_SIZE + REASON_SIZE
"""Most bytes of a message in a handshake."""
_ROLE = struct.Struct("<II")


class Keys(NamedTuple):
    """Keys of the messages of each end."""

    worker: bytes
    server: bytes


class Handshake(NamedTuple):
    """Identity of a handshake: the worker's rank, the server's shard, and both nonces."""

    rank: int
    shard: int
    worker: bytes
    server: bytes = b""

    @property
    def nonces(self) -> bytes:
        """Return both nonces, in `NAME_SIZE` bytes."""
        assert len(self.worker) + len(self.server) == 2 * NONCE_SIZE == NAME_SIZE
        return self.worker + self.server

    def proof(self, secret: bytes, role: str, payload: bytes = b"") -> bytes:
        """Return the proof that the sender of ``payload`` knows ``secret``.

        ``role`` is "worker", "worker beside", "server" or "refusal".
        """
        return proof(secret, role, _ROLE.pack(self.rank, self.shard), self.worker, self.server, payload)

    def keys(self, secret: bytes) -> Keys:
        """Return the keys of the messages that follow."""
        return Keys(*(self.proof(secret, f"key of the {sender}")[:16] for sender in ("worker", "server")))
