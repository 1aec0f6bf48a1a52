"""Sums and 16-bit numbers against PyTorch's, and how pieces lie against numpy's."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foretrain.server.sums import Pushed, add_up, narrowed, widened

words = st.lists(st.integers(0, 2**16 - 1), min_size=1, max_size=20)


@pytest.mark.parametrize(("dtype", "raw"), [("bfloat16", np.uint16), ("float16", np.float16)])
@given(values=words)
def test_widened_is_exact(dtype, raw, values):
    bits = np.array(values, np.uint16)
    expected = torch.from_numpy(bits.view(np.int16)).view(getattr(torch, dtype)).float().numpy()
    np.testing.assert_array_equal(widened(bits.view(raw), dtype), expected)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@given(values=st.lists(st.floats(width=32), min_size=1, max_size=20))
def test_narrowed_as_pytorch_rounds(dtype, values):
    wide = np.array(values, np.float32)
    expected = torch.from_numpy(wide).to(getattr(torch, dtype))
    found = torch.from_numpy(narrowed(wide, dtype).view(np.int16)).view(getattr(torch, dtype))
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.nan_to_num(), expected.nan_to_num())


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
