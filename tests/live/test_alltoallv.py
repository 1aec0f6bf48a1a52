"""Rows of splits: what live members tell, and what follows for those they stand for."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from foretrain.errors import ConfigError
from foretrain.live.comm_layout import Rows, relative

MOST = 1 << 16
GROUP = (3, 1, 7, 5, 11)
"""World ranks out of order."""
row_of_any = arrays(np.int64, len(GROUP), elements=st.integers(0, 9))


def dense(told: object, live: tuple[int, ...] = GROUP[:1], most: int = MOST) -> NDArray[np.int64] | None:
    """Bytes from each member to each; members that are not live have live ones in turn."""
    stands = {rank: rank if rank in live else live[place % len(live)] for place, rank in enumerate(GROUP)}
    sends = Rows.of(GROUP, told).sends(GROUP, stands.__getitem__, most)  # pyright: ignore[reportArgumentType]
    if sends is None:
        return None
    found = np.zeros((len(GROUP), len(GROUP)), np.int64)
    assert (sends.size > 0).all()
    np.add.at(found, (sends.source, sends.target), sends.size)
    assert sends.most == max(found.sum(axis=1))
    return found


def rolled(row: NDArray[np.int64], place: int) -> NDArray[np.int64]:
    """Rows of all members of which the one at ``place`` has ``row``, relative to themselves."""
    return np.stack([np.roll(row, index - place) for index in range(len(GROUP))])


@given(row_of_any, st.integers(0, len(GROUP) - 1))
def test_one_row_with_a_zero_is_relative_and_every_member_then_gets_as_much_as_it_sends(
    row: NDArray[np.int64], place: int
) -> None:
    live = GROUP[place]
    found = dense({live: row.tolist()}, (live,))
    assert found is not None
    if (row == 0).any():
        assert (found == rolled(row, place)).all()
        assert (found.sum(axis=0) == row.sum()).all()
    else:
        assert (found == row).all()


@given(row_of_any, st.sets(st.integers(0, len(GROUP) - 1), min_size=2))
def test_of_several_rows_the_reading_that_explains_them_is_taken(row: NDArray[np.int64], places: set[int]) -> None:
    live = tuple(GROUP[place] for place in sorted(places))
    for rows in (rolled(row, 0), np.tile(row, (len(GROUP), 1))):
        told = {GROUP[place]: rows[place].tolist() for place in sorted(places)}
        if (rolled(row, 0)[sorted(places)] != row).any():  # else both explain them
            assert (dense(told, live) == rows).all()


@given(arrays(np.int64, (len(GROUP), len(GROUP)), elements=st.integers(0, 9)))
def test_rows_of_all_are_taken_as_they_are(rows: NDArray[np.int64]) -> None:
    found = dense(dict(zip(GROUP, rows.tolist(), strict=True)), GROUP)
    assert found is not None
    assert (found == rows).all()


def test_a_row_given_for_all_is_the_same_for_all_whatever_is_in_it() -> None:
    assert (dense((0, 9, 0, 0, 0)) == (0, 9, 0, 0, 0)).all()  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]
    assert relative({2: np.array([0, 9, 0])})
    assert not relative({2: np.array([1, 9, 1])})


def test_too_many_messages_and_rows_of_another_length() -> None:
    assert dense((1, 1, 0, 0, 0), most=10) is not None
    assert dense((1, 1, 1, 0, 0), most=10) is None
    with pytest.raises(ConfigError, match="of rank 7 are not one per rank"):
        dense({7: (1, 2)})
