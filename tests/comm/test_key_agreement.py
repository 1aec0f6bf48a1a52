"""Ranks agree on a secret that is not in what they send."""

import pytest

from foretrain.comm.key_agreement import PRIME, _joined, agreed_secret
from tests.comm.bounded.group import controls, in_threads


def agree(ranks):
    """Return the secret that each rank has, and everything that they have sent."""
    made = controls(ranks)
    return in_threads(ranks, lambda rank: agreed_secret(made[rank])), made[0].sent


def arctangent(inverse, unit):
    """Return arctan(1 / inverse) in units of 1 / unit."""
    total = term = unit // inverse
    for place in range(1, unit.bit_length()):
        term //= inverse * inverse
        total += (-1) ** place * (term // (2 * place + 1))
    return total


def is_prime(number):
    """Fermat's test, which no composite number of this kind is known to pass."""
    return all(pow(base, number - 1, number) == 1 for base in (2, 3, 5))


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_all_ranks_have_one_secret_which_none_has_sent(ranks):
    found, sent = agree(ranks)
    (secret,) = set(found)
    assert len(secret) == 32
    for said in sent:
        assert secret not in said
        assert secret.hex().encode() not in said


def test_secrets_and_all_that_is_sent_are_new_each_time():
    (one, sent), (other, sent_again) = agree(3), agree(3)
    assert one[0] != other[0]
    assert not set(sent) & set(sent_again)


def test_numbers_are_between_one_and_the_prime():
    _, sent = agree(2)
    numbers = [int.from_bytes(said, "little") for said in sent if len(said) == 256]
    assert len(numbers) == 2
    assert all(1 < number < PRIME - 1 for number in numbers)


def test_a_number_is_the_same_behind_its_words():
    words = [5, -1, 0, 1 << 62]
    assert _joined(words) == 5 + ((1 << 64) - 1 << 64) + (1 << 62 + 3 * 64)


def test_the_prime_is_that_of_rfc_3526_and_safe():
    unit = 1 << 2100
    pi = 4 * (4 * arctangent(5, unit) - arctangent(239, unit))
    assert 2**2048 - 2**1984 - 1 + 2**64 * ((pi >> 2100 - 1918) + 124476) == PRIME
    assert is_prime(PRIME)
    assert is_prime(PRIME // 2)
