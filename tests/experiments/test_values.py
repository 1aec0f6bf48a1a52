"""Lists and ranges, with units and without."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrain.errors import ConfigError
from foretrain.experiments.conditions import Quantity, Range, quantity, values


@pytest.mark.parametrize(
    ("axis", "expected"),
    [
        ("ring", ("ring",)),
        (4, (4,)),
        (["1MB", "4MB", "1MB"], ("1MB", "4MB")),
        (Range("1Gbps", "100Gbps", 3), ("1Gbps", "10Gbps", "100Gbps")),
        (Range("1Gbps", "100Gbps", 5), ("1Gbps", "3160Mbps", "10Gbps", "31600Mbps", "100Gbps")),
        (Range("1MB", "4MB", 3), ("1MB", "2MB", "4MB")),
        (Range("0us", "20us", 3, "linear"), ("0us", "10us", "20us")),
        (Range(2, 16, 4), (2, 4, 8, 16)),
        (Range(1, 3, 9), (1, 2, 3)),
        (Range(0.5, 1.5, 3, "linear"), (0.5, 1.0, 1.5)),
    ],
)
def test_an_axis_is_its_values(axis, expected):
    assert values(axis, "x") == expected


@given(st.floats(1e3, 1e11), st.floats(1.5, 1e4), st.integers(2, 40))
def test_a_range_ascends_from_end_to_end(low, ratio, points):
    low, high = f"{low:.0f}bps", f"{low * ratio:.0f}bps"
    found = values(Range(low, high, points), "rate")

    numbers = [one.number for one in map(quantity, found) if one]
    assert (found[0], found[-1]) == (low, high)
    assert numbers == sorted(numbers)
    assert len(found) <= points


@pytest.mark.parametrize(
    ("axis", "words"),
    [
        ([], "is empty"),
        (Range("1Gbps", "4MB", 3), "from a rate to a size"),
        (Range("1Gbps", "1Gbps", 3), "does not ascend"),
        (Range("1Gbps", "2Gbps", 1), "points: 1 "),
        (Range("ring", "2Gbps", 3), "'ring' is no end"),
        (Range("0us", "2us", 3), "has no logarithm"),
    ],
)
def test_what_is_wrong_is_said(axis, words):
    with pytest.raises(ConfigError, match=words):
        values(axis, "x")


def test_quantities_have_kinds():
    assert quantity("8Gbps") == Quantity("rate", 1e9)
    assert quantity("8ms") == Quantity("time", 0.008)
    assert quantity("8MB") == Quantity("size", 8e6)
    assert quantity("8") == quantity(8) == Quantity("number", 8)
    assert quantity("hdrm") is None
