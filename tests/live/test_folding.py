"""Folding: the meshes that people train on, and that everything represented is counted once."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrain.errors import ConfigError
from foretrain.live.folding import Folding, Group, Message


def mesh(*sizes: int) -> tuple[list[Group], list[int]]:
    """The groups that DeviceMesh makes of the world: a family for each dimension, all rows along it."""
    ranks = np.arange(math.prod(sizes)).reshape(sizes)
    groups, families = [], []
    for dim, size in enumerate(sizes):
        for row in np.moveaxis(ranks, dim, -1).reshape(-1, size).tolist():
            groups.append(tuple(row))
            families.append(dim + 1)
    return groups, families


def along(groups: list[Group], families: list[int], dim: int, rank: int) -> Group:
    """The group of ``rank`` in a dimension."""
    return next(g for g, f in zip(groups, families, strict=True) if f == dim + 1 and rank in g)


def pipeline(group: Group) -> list[Message]:
    """What the first stage of a pipeline sends and receives."""
    return [(group[0], group[1], group), (group[1], group[0], group)]


@pytest.mark.parametrize("sizes", [(64,), (8, 4), (16, 8)])
def test_ranks_that_send_no_messages_have_one_representative(sizes: tuple[int, ...]) -> None:
    """Data parallelism, alone or with tensor or expert parallelism or hybrid sharding inside: rows act together."""
    groups, families = mesh(*sizes)
    world = math.prod(sizes)
    folding = Folding.discover(world, groups, families, [])
    assert folding.live == (0,)
    assert {folding.representative(rank) for rank in range(world)} == {0}
    for dim, size in enumerate(sizes):
        rows = [group for group, family in zip(groups, families, strict=True) if family == dim + 1]
        assert folding.images(along(groups, families, dim, 0)) == tuple(rows)
        assert folding.multiplicity(rows[0]) == {0: size}
    assert folding.describe() == (f"{world} ranks in 1 class", f"rank 0 stands for 0-{world - 1} ({world})")


@pytest.mark.parametrize("sizes", [(4, 2, 2), (4, 8, 8), (2, 3, 4)])
def test_a_pipeline_has_a_live_rank_for_each_stage(sizes: tuple[int, int, int]) -> None:
    """PP × DP × TP: a rank is alike with its stage of rank 0's pipeline."""
    groups, families = mesh(*sizes)
    _, data, tensor = sizes
    world, stride = math.prod(sizes), data * tensor
    own = along(groups, families, 0, 0)
    folding = Folding.discover(world, groups, families, pipeline(own))
    assert folding.live == own == tuple(range(0, world, stride))
    for rank in range(world):
        assert folding.representative(rank) == rank // stride * stride
    for stage in own:
        group = along(groups, families, 1, stage)
        assert folding.images(group) == tuple(along(groups, families, 1, stage + t) for t in range(tensor))
    assert set(folding.message_images(0, stride)) == {(rank, rank + stride) for rank in range(stride)}
    assert set(folding.message_images(own[-1], own[-2], own)) == {
        (rank, rank - stride) for rank in range(world - stride, world)
    }
    assert folding.multiplicity(tuple(range(world))) == dict.fromkeys(own, stride)


def test_a_pipeline_inside_of_data_parallelism() -> None:
    """DP × PP × TP by messages over the world: to the end of the world first, until the stages have been heard."""
    world = tuple(range(64))  # 4 × 4 × 4
    guessed = Folding.discover(64, [], [], [(0, 4, world)])
    assert guessed.live == tuple(range(0, 64, 4))
    messages = [(at, at + 4, world) for base in range(0, 64, 16) for at in range(base, base + 12, 4)]
    folding = Folding.discover(64, [], [], messages, heard=guessed.live)
    assert folding.live == (0, 4, 8, 12)
    assert [folding.representative(rank) for rank in (3, 5, 17, 63)] == [0, 4, 0, 12]
    assert folding.message_images(4, 8, world)[:2] == ((4, 8), (5, 9))
    assert set(folding.message_images(4, 8)) == {(b + t + 4, b + t + 8) for b in range(0, 64, 16) for t in range(4)}


@pytest.mark.parametrize(
    ("sizes", "dim", "stride", "live"), [((4, 2), 1, 1, 2), ((2, 4, 2), 1, 2, 4), ((2, 8), 1, 4, 2)]
)
def test_messages_over_the_world_stay_in_the_smallest_group_that_has_both(
    sizes: tuple[int, ...], dim: int, stride: int, live: int
) -> None:
    """DP × PP, DP × PP × TP, and DP × (PP × TP) in one group: stages that nobody has heard end with the group."""
    groups, families = mesh(*sizes)
    world = tuple(range(math.prod(sizes)))
    rows = [group for group, family in zip(groups, families, strict=True) if family == dim + 1]
    folding = Folding.discover(len(world), [world, *rows], [0, *[1] * len(rows)], [(0, stride, world)])
    assert folding.live == tuple(range(0, live * stride, stride))
    assert len(folding.message_images(0, stride, world)) == len(world) // live


def test_pairs_of_stages_as_groups_are_one_chain() -> None:
    """Groups of neighbours overlap; a rank then has its place in the chain of all."""
    groups = [(a + t, a + t + 4) for a in range(0, 12, 4) for t in range(4)]
    messages: list[Message] = [(group[0], group[1], group) for group in groups]
    folding = Folding.discover(16, groups, [1] * len(groups), messages, heard=range(16))
    assert folding.live == (0, 4, 8, 12)
    assert folding.representative(11) == 8
    assert set(folding.message_images(4, 8)) == {(4 + t, 8 + t) for t in range(4)}


def test_a_ring_of_messages_beside_a_pipeline() -> None:
    """Both families have messages: a live rank for each pair of places."""
    groups, families = mesh(2, 3, 4)
    own, ring = along(groups, families, 0, 0), along(groups, families, 2, 0)
    folding = Folding.discover(24, groups, families, pipeline(own) + pipeline(ring))
    assert folding.live == (0, 1, 2, 3, 12, 13, 14, 15)
    assert folding.representative(21) == 13
    assert set(folding.message_images(1, 13)) == {(1, 13), (5, 17), (9, 21)}
    assert set(folding.message_images(1, 2)) == {(1, 2), (5, 6), (9, 10)}


def test_more_live_ranks_are_whole_pipelines() -> None:
    groups, families = mesh(4, 4, 4)
    messages = pipeline(along(groups, families, 0, 0))
    folding = Folding.discover(64, groups, families, messages, n=9)
    assert folding.live == (0, 1, 16, 17, 32, 33, 48, 49)
    assert [folding.representative(rank) for rank in (1, 2, 3, 18, 19)] == [1, 0, 1, 16, 17]
    assert Folding.discover(64, n=8).live == tuple(range(8))
    assert Folding.discover(8, n=8).live == Folding.all_live(8).live


def test_groups_with_live_members_are_nobodys_image() -> None:
    groups, families = mesh(4, 4)
    folding = Folding.discover(16, groups, families, n=6)
    live = [along(groups, families, 1, rank) for rank in (0, 4)]
    assert folding.images(live[1])[0] == live[1]
    together = [image for group in live for image in folding.images(group)]
    assert sorted(together) == [along(groups, families, 1, rank) for rank in (0, 4, 8, 12)]


def test_stages_without_a_counterpart_stay_live() -> None:
    """Only some ranks have siblings in the pipeline's family: the others run themselves."""
    groups = [(0, 4), (1, 5)]
    folding = Folding.discover(8, groups, [1, 1], pipeline((0, 4)))
    assert folding.live == (0, 2, 3, 4, 6, 7)


@given(
    st.lists(st.integers(1, 4), min_size=2, max_size=4).filter(lambda sizes: math.prod(sizes) > 1),
    st.integers(0, 3),
    st.integers(0, 256),
)
def test_every_group_and_message_has_one_live_image(sizes: list[int], dim: int, live: int) -> None:
    """Multiplicities sum to the group; every group and every message of the world is the image of one live one."""
    groups, families = mesh(*sizes)
    world = math.prod(sizes)
    dim %= len(sizes)
    own = along(groups, families, dim, 0)
    messages = pipeline(own) if len(own) > 1 else []
    least = len(own)
    folding = Folding.discover(world, groups, families, messages, n=min(max(live, least), world))
    alive = set(folding.live)
    for family in set(families):
        siblings = [g for g, f in zip(groups, families, strict=True) if f == family]
        acting = [group for group in siblings if alive & set(group)]
        assert sorted(itertools.chain.from_iterable(map(folding.images, acting))) == sorted(siblings)
        for group in acting:
            assert sum(folding.multiplicity(group).values()) == len(group)
    if messages:
        row = [g for g, f in zip(groups, families, strict=True) if f == dim + 1]
        sent = {(g[0], g[1]) for g in row}
        images = [pair for a, b in sent if a in alive for pair in folding.message_images(a, b)]
        assert sorted(images) == sorted(sent)
        assert all(b in alive for a, b in sent if a in alive)


def test_groups_may_come_later_and_again() -> None:
    folding = Folding.discover(4, [], [], [])
    assert folding.images((0, 1)) == ((0, 1),)
    for _ in range(2):
        folding.add((0, 1), 7)
        folding.add((2, 3), 7)
    assert folding.images((0, 1)) == ((0, 1), (2, 3))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Folding.discover(4, [(0, 4)], [1], []), "--nproc"),
        (lambda: Folding.discover(4, n=5), "not a number of ranks among 4"),
        (lambda: Folding.discover(4, [(0, 2), (1, 3)], [1, 1], pipeline((0, 2)), n=1), "2 stages"),
        (lambda: Folding.discover(4, [], [], [(0, 9, (0, 9))]), "names no rank"),
        (lambda: Folding.discover(4, [(0, 1)], [], []), "one per group"),
    ],
)
def test_groups_and_messages_that_cannot_be_are_refused(make: Callable[[], Folding], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()


def test_many_classes_are_described_shortly() -> None:
    groups, families = mesh(16, 64)
    lines = Folding.discover(1024, groups, families, pipeline(along(groups, families, 0, 0))).describe()
    assert lines[0] == "1,024 ranks in 16 classes"
    assert lines[2] == "rank 64 stands for 64-127 (64)"
    assert lines[-1] == "and 4 more"
    tensor = Folding.discover(1024, *mesh(64, 16), pipeline(along(*mesh(64, 16), 1, 0))).describe()
    assert tensor[1] == "rank 0 stands for 0, 16, 32, 48, … (64)"
