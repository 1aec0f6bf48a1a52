"""Placement: every byte has one home, and no shard has more than a part above its share."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrain.comm.ps.frames import Malformed
from foretrain.comm.ps.placement import Declaration, Declared, Placement
from foretrain.errors import ConfigError
from foretrain.network.shards import part_limit
from foretrain.network.switch_cluster import MESSAGE
from foretrain.tasks import Piece

sizes = st.lists(st.integers(1, 5000).map(lambda size: 4 * size), min_size=1, max_size=12)


def declaration(sizes, limit=4096):
    tasks = tuple(Declared(f"layer{place}", size, "float32", place) for place, size in enumerate(sizes))
    return Declaration(tasks, 2, limit=limit)


@given(sizes, st.integers(1, 5), st.integers(64, 8192), st.data())
def test_every_byte_of_a_piece_has_one_home(sizes, shards, limit, data):
    placement = Placement(declaration(sizes, limit), shards)
    assert [part.number for part in placement.parts] == list(range(len(placement.parts)))
    assert all(part.size <= limit and part.offset % 64 == 0 for part in placement.parts)
    for task, size in enumerate(sizes):
        offset = at = data.draw(st.integers(0, size - 1))
        length = data.draw(st.integers(1, size - offset))
        for part, start, count in placement.of(Piece(task, offset, length)):
            assert (part.task, part.offset + start) == (task, at)
            assert 0 < count <= part.size - start
            at += count
        assert at == offset + length


@given(sizes, st.integers(1, 5))
def test_shards_are_balanced(sizes, shards):
    placement = Placement(declaration(sizes), shards)
    loads = [sum(part.size for part in placement.parts if part.shard == shard) for shard in range(shards)]
    largest = max(part.size for part in placement.parts)
    assert max(loads) <= sum(loads) / shards + largest


@given(sizes, st.integers(1, 5), st.data())
def test_shards_are_balanced_over_whatever_is_pushed_together(sizes, shards, data):
    placement = Placement(declaration(sizes), shards)
    first = data.draw(st.integers(0, len(placement.parts) - 1))
    together = placement.parts[first : data.draw(st.integers(first + 1, len(placement.parts)))]
    loads = [sum(part.size for part in together if part.shard == shard) for shard in range(shards)]
    largest = max(part.size for part in placement.parts)
    assert max(loads) <= min(loads) + 2 * largest


def test_a_partition_is_on_all_shards():
    assert part_limit({"partition": 400_000}, 2) == 200_000
    assert part_limit({"partition": 400_000}, 1) == MESSAGE
    assert part_limit({"slice": 400_000}, 2) == MESSAGE // 2
    assert part_limit({"partition": 4_000_000}, 2) == part_limit({"partition": 1 << 34}, 16) == MESSAGE
    assert part_limit({"partition": 1000}, 2) == 128 << 10
    assert part_limit({}, 4, message=1 << 30) == (1 << 30) // 4


def test_a_declaration_is_read_as_it_was_written():
    one = declaration([4, 8])
    assert Declaration.decode(one.encode()) == one
    assert one.difference(declaration([4, 8])) is None
    assert "layer1" in (one.difference(declaration([4, 12])) or "")
    assert one.difference(declaration([4])) == "2 tasks against 1"
    assert one.difference(declaration([4, 8], 64)) == "parts of 4096 against 64 bytes"


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"{}",
        b'{"tasks": [{"name": "a", "size": 6, "dtype": "float32", "urgency": 0}], "workers": 2}',
        b'{"tasks": [{"name": "a", "size": 0, "dtype": "float32", "urgency": 0}], "workers": 2}',
        b'{"tasks": [{"name": "a", "size": 8, "dtype": "int8", "urgency": 0}], "workers": 2}',
        b'{"tasks": [], "workers": 2, "limit": 1}',
        b'{"tasks": [], "workers": 2, "job": "../../etc/x"}',
    ],
)
def test_malformed_declarations_are_refused(payload):
    with pytest.raises(Malformed):
        Declaration.decode(payload)


def test_a_placement_needs_a_shard():
    with pytest.raises(ConfigError, match=r"servers: 0 is no number of servers; write at least 1"):
        Placement(declaration([4]), 0)
