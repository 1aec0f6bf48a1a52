import contextlib
from fractions import Fraction

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from foretrain import units
from foretrain.errors import ConfigError
from foretrain.units import COST_SHIFT, MICROSECOND, MILLISECOND, SECOND, moving, per_byte

PARSERS = (units.parse_time, units.parse_size, units.parse_rate)


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (units.parse_time, "2us", 2 * MICROSECOND),
        (units.parse_time, "2 µs", 2 * MICROSECOND),  # the micro sign
        (units.parse_time, "2μs", 2 * MICROSECOND),  # the Greek letter
        (units.parse_time, "1e-3s", MILLISECOND),
        (units.parse_time, "2min", 120 * SECOND),
        (units.parse_time, "0s", 0),
        (units.parse_time, "0.1ps", 1),  # parts of the smallest unit round up
        (units.parse_size, "0.1B", 1),
        (units.parse_size, "25MB", 25_000_000),
        (units.parse_size, "1MiB", 1 << 20),
        (units.parse_size, "1kB", 1000),
        (units.parse_size, "1KiB", 1024),
        (units.parse_size, "1.5GiB", 3 << 29),
        (units.parse_rate, "100Gbps", 12.5e9),
        (units.parse_rate, "100 Gb/s", 12.5e9),
        (units.parse_rate, "12.5GB/s", 12.5e9),
        (units.parse_rate, "8bps", 1.0),
        (units.parse_share, "3.5%", 0.035),
        (units.parse_share, " 100 %", 1.0),
        (units.parse_share, ".2", 0.2),
        (units.parse_share, "1e-05", 1e-5),
    ],
)
def test_a_time_a_size_and_a_rate_are_read(parse, text, value):
    assert parse(text) == value


@pytest.mark.parametrize("parse", PARSERS)
@pytest.mark.parametrize(
    "wrong",
    ["5", "5.0", 5, 5.0, None, "", " ", "nan", "nanus", "NaN s", "inf", "-1s", "-1B", "-1Gbps", "1_000B", "s", "٣s"],
)
def test_what_has_no_unit_no_number_or_a_sign_is_refused(parse, wrong):
    with pytest.raises(ConfigError, match=r"^links\.rate: .* is not a (time|size|rate); write e\.g\. '"):
        parse(wrong, "links.rate")


@pytest.mark.parametrize(
    ("parse", "wrong"),
    [
        (units.parse_rate, "100Gb"),  # bits are no rate
        (units.parse_rate, "100gbps"),  # case carries meaning
        (units.parse_size, "100Mb"),  # bits are no size
        (units.parse_time, "1S"),
        (units.parse_time, "25MB"),
        *((units.parse_rate, text) for text in ("0Gbps", "1e-400Gbps", "1e400bps", "9" * 5000 + "bps", "1e99bps")),
    ],
)
def test_a_wrong_unit_and_a_rate_beyond_reason_are_refused(parse, wrong):
    with pytest.raises(ConfigError, match=f"'{wrong[:40]}.* is not a"):
        parse(wrong)


@pytest.mark.parametrize("parse", PARSERS)
@given(text=st.text())
def test_no_text_breaks_a_parser(parse, text):
    with contextlib.suppress(ConfigError):
        assert parse(text) >= 0


@given(st.integers(0, 10**18))
def test_times_round_up_never_down(numerator):
    text = f"{Fraction(numerator, 10**6).__float__():.6f}us"
    exact = Fraction(text[:-2]) * MICROSECOND
    assert 0 <= units.parse_time(text) - exact < 1


@pytest.mark.parametrize(
    ("exact", "value", "text"),
    [
        (units.exact_time, 12_345_678, "12.345678us"),
        (units.exact_time, 2 * SECOND, "2s"),
        (units.exact_size, 25_000_000, "25MB"),
        (units.exact_size, 25 << 20, "25MiB"),
        (units.exact_rate, 1.25e10, "100Gbps"),
        (units.exact_rate, 1250.0, "10kbps"),
        (units.exact_rate, 1.5, "1.5B/s"),
    ],
)
def test_exact_text_is_as_short_as_people_write_it(exact, value, text):
    assert exact(value) == text


@given(st.integers(0, 2**63 - 1), st.floats(1e-9, 1e18))
@example(0, 1.25e10)
@example(SECOND - 1, 1e18)
@example(1 << 30, 1e18)
def test_a_time_a_size_and_a_rate_survive_text_exactly(number, rate):
    assert units.parse_time(units.exact_time(number)) == number
    assert units.parse_size(units.exact_size(number)) == number
    assert units.parse_rate(units.exact_rate(rate)) == rate


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (units.format_time(850 * MILLISECOND), "850 ms"),
        (units.format_time(999_960_000), "1.00 ms"),
        (units.format_time(0), "0 s"),
        (units.format_time(-2 * SECOND), "-2.00 s"),
        (units.format_size(512), "512 B"),
        (units.format_size(0.875), "0.875 B"),
        (units.format_rate(1.25e8), "1.00 Gbps"),
    ],
)
def test_people_read_three_digits(text, expected):
    assert text == expected


@given(st.floats(0.5, 1e15))
@example(0.875)
def test_three_digits_are_within_half_a_percent(value):
    number, unit = units.format_size(value).split()
    scale = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9}[unit]
    assert float(number) * scale == pytest.approx(value, rel=0.0051)


@given(st.floats(1e3, 1e14), st.fractions(Fraction(1, 64), 4))
def test_a_byte_costs_at_least_what_it_takes_and_at_most_a_quantum_more(rate, factor):
    exact = factor * SECOND / Fraction(rate)
    assert 0 <= Fraction(per_byte(rate, factor), 1 << COST_SHIFT) - exact < Fraction(1, 1 << COST_SHIFT)


@given(st.lists(st.integers(1, 10**9), min_size=1, max_size=50), st.floats(1e6, 1e14))
def test_parts_never_take_less_than_the_whole(parts, rate):
    cost = per_byte(rate)
    whole = sum(parts) * cost
    pieces = sum(moving(part, cost) for part in parts)
    assert whole >> COST_SHIFT <= moving(sum(parts), cost) <= pieces < (whole >> COST_SHIFT) + 1 + len(parts)


@pytest.mark.parametrize("text", ["", "a fifth", "-1%", "20 percent", "nan", "1e400x"])
def test_what_is_no_share_is_refused(text):
    with pytest.raises(ConfigError, match="is not a share"):
        units.parse_share(text)
