"""Proof of identity by a shared secret, for links between ranks and between workers and parameter servers.

Both ends send a fresh nonce and prove with an HMAC over both that they know the job's secret. The label tells the roles
apart, so that a proof cannot be sent back to whom it came from; the nonces make a recorded one worthless.
"""

from __future__ import annotations

import hmac
import secrets
from typing import Final

NONCE_SIZE: Final = 32
PROOF_SIZE: Final = 32


def nonce() -> bytes:
    """Return `NONCE_SIZE` random bytes."""
    return secrets.token_bytes(NONCE_SIZE)


def proof(secret: bytes, label: str, *fields: bytes) -> bytes:
    """Return the HMAC-SHA256 over ``label`` and ``fields``.

    All fields but the last have a fixed size, and labels have no NUL, so that no two inputs join to the same bytes.
    """
    return hmac.digest(secret, label.encode() + b"\0" + b"".join(fields), "sha256")


def same(given: bytes, expected: bytes) -> bool:
    """Return whether the two are equal, in a time that does not depend on where they differ."""
    return hmac.compare_digest(given, expected)
