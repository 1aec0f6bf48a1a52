"""Sums and 16-bit numbers against PyTorch's, and how pieces lie against numpy's."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foretrain.comm.ps.server.sums import Pushed, add_up, narrow, widened


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_widened_is_exact(dtype):
    bits = np.arange(1 << 16, dtype=np.uint16)
    expected = torch.from_numpy(bits.view(np.int16)).view(getattr(torch, dtype)).float().numpy()
    np.testing.assert_array_equal(widened(bits, dtype), expected)
    np.testing.assert_array_equal(np.signbit(widened(bits, dtype)), np.signbit(expected))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_numbers_between_neighbours_are_rounded_as_pytorch_does(dtype):
    """All finite 16-bit numbers, the middles between neighbours, their neighbours in float32, and extremes."""
    exact = widened(np.arange(1 << 16, dtype=np.uint16), dtype)
    exact = np.sort(exact[np.isfinite(exact)])
    half = (exact[1:].astype(np.float64) + exact[:-1]) / 2
    middle = half.astype(np.float32)
    extremes = np.float32([np.inf, -np.inf, np.nan, -np.nan, 3.4e38, -3.4e38, 65519.99, 65520.0, 1e-40, -1e-45])
    wide = np.concatenate([exact, middle, np.nextafter(middle, -np.inf), np.nextafter(middle, np.inf), extremes])
    expected = torch.from_numpy(wide.copy()).to(getattr(torch, dtype))
    bits = np.empty(len(wide), np.uint16)
    narrow(wide, dtype, bits)
    found = torch.from_numpy(bits.view(np.int16)).view(getattr(torch, dtype))
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.nan_to_num(), expected.nan_to_num())
    assert torch.equal(found.signbit()[~found.isnan()], expected.signbit()[~found.isnan()])


@given(st.data())
@settings(max_examples=60)
def test_pieces_of_any_length(data):
    count = data.draw(st.integers(1, 30))
    ranks, table = [], np.zeros((4, count))
    for row in table:
        edges = sorted({0, count, *data.draw(st.lists(st.integers(0, count), max_size=3))})
        pieces = []
        for low, high in pairwise(edges):
            if data.draw(st.booleans()):
                row[low:high] = data.draw(st.integers(1, 9))
                pieces.append(Pushed(8 * low, memoryview(row[low:high].tobytes())))
        ranks.append(pieces)
    low = data.draw(st.integers(0, count - 1))
    high = data.draw(st.integers(low + 1, count))
    out = np.full(count, 7.0)
    some = add_up(ranks, 8 * low, 8 * high, "float64", memoryview(out).cast("B"), 0.5)
    assert some == bool(table[:, low:high].any())
    expected = np.full(count, 7.0)
    if some:
        expected[low:high] = 0.5 * table[:, low:high].sum(0)
    np.testing.assert_array_equal(out, expected)


def test_blocks_are_no_seams():
    random = np.random.default_rng(0)
    rows = random.standard_normal((3, 100_001), np.float32)
    out = bytearray(rows[0].nbytes)
    assert add_up([[Pushed(0, memoryview(row.tobytes()))] for row in rows], 0, len(out), "float32", memoryview(out))
    np.testing.assert_array_equal(np.frombuffer(out, np.float32), rows[0] + rows[1] + rows[2])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("shift", [0, 1])
def test_halves_are_added_where_they_lie(dtype, shift):
    """In a buffer that cannot be written to, at any address."""
    torch.manual_seed(0)
    ranks = [torch.randn(70_000).to(getattr(torch, dtype)) for _ in range(3)]
    pushed = [
        [Pushed(0, memoryview(bytes(shift) + each.view(torch.uint8).numpy().tobytes())[shift:])] for each in ranks
    ]
    out = bytearray(140_000)
    assert add_up(pushed, 0, 140_000, dtype, memoryview(out), 1.5)
    expected = (1.5 * ((ranks[0].float() + ranks[1].float()) + ranks[2].float())).to(getattr(torch, dtype))
    assert bytes(out) == expected.view(torch.uint8).numpy().tobytes()
