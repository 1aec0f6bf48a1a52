"""The proofs of a handshake: each is of one role, rank, shard and pair of nonces."""

from foretrain.comm.coordinator.handshake import nonce
from foretrain.comm.ps.frames import Handshake

SECRET = bytes(range(32))


def test_a_proof_is_of_one_role_rank_shard_and_pair_of_nonces():
    c, s = nonce(), nonce()
    identities = [Handshake(rank, shard, *each) for rank in (0, 1) for shard in (0, 1) for each in ((c, s), (s, c))]
    roles = ("worker", "worker beside", "server", "refusal")
    proofs = {each.proof(secret, role) for secret in (SECRET, b"x" * 32) for role in roles for each in identities}
    assert len(proofs) == 64
    keys = {key for secret in (SECRET, b"x" * 32) for each in identities for key in each.keys(secret)}
    assert len(keys) == 32
