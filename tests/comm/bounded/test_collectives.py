import os
import time
from typing import get_args

import numpy as np
import pytest

from foretrain.comm.bounded.collectives import BoundedCollectives, Hint
from foretrain.comm.collectives.plan import DOUBLING_LIMIT, KINDS
from foretrain.comm.coordinator.link import LinkError
from foretrain.comm.options import Ending
from foretrain.errors import ConfigError
from tests.comm.bounded.group import engines, group, has_ipv6, in_threads
from tests.comm.bounded.relay import Network, hostile, losing, perfect
from tests.comm.collectives.test_ring import group as ring_group
from tests.comm.collectives.test_ring import inputs, nothing_is_left_behind, run
from tests.waiting import until

__all__ = ["nothing_is_left_behind"]

OVER = ("transpose", "ring", "halving_doubling")
PAYLOAD = 8192
"""Bytes of a packet's data on loopback."""


@pytest.mark.parametrize(("ranks", "over"), [(1, "ring"), (2, "ring"), (3, "ring"), (3, "transpose"), (4, "transpose")])
def test_all_reduce_gives_the_sum_in_every_type_and_size(ranks, over):
    with group(ranks, over=over) as members:
        for kind, item in KINDS.items():
            for count in (0, 1, ranks - 1, ranks, 257, 70_000 // item + 5, 500_000 // item):
                arrays, total = inputs(kind, ranks, count)
                run(members, "all_reduce", arrays, bfloat16=kind == "bfloat16")
                for values in arrays:
                    np.testing.assert_array_equal(values, total, f"{kind}, {count} elements")


@pytest.mark.parametrize("over", OVER)
def test_halves_of_an_all_reduce_give_it_together(over):
    with group(4, over=over) as members:
        arrays, total = inputs("float32", 4, 40_000)
        run(members, "reduce_scatter", arrays)
        for rank, values in enumerate(arrays):
            mine = slice(rank * 10_000, (rank + 1) * 10_000)
            np.testing.assert_array_equal(values[mine], total[mine])
        run(members, "all_gather", arrays)
        for values in arrays:
            np.testing.assert_array_equal(values, total)


@pytest.mark.parametrize(("ranks", "over"), [(2, "ring"), (3, "ring"), (3, "transpose"), (4, "ring"), (4, "transpose")])
def test_without_losses_the_bits_are_those_of_the_ring_over_tcp(ranks, over):
    sizes = (5, DOUBLING_LIMIT // 4, DOUBLING_LIMIT // 4 + 1, 100_003)
    rng = np.random.default_rng(ranks)
    inputs = [[rng.standard_normal(n).astype(np.float32) for _ in range(ranks)] for n in sizes]
    expected = [[each.copy() for each in arrays] for arrays in inputs]
    with ring_group(ranks) as members:
        for arrays in expected:
            run(members, "all_reduce", arrays)
    with group(ranks, over=over) as members:
        for arrays, wanted in zip(inputs, expected, strict=True):
            run(members, "all_reduce", arrays)
            for values in arrays:
                np.testing.assert_array_equal(values.view(np.uint32), wanted[0].view(np.uint32))


@pytest.mark.parametrize("over", OVER)
def test_nothing_is_lost_without_tolerance_whatever_the_network_does(over):
    with Network(hostile(0.2)) as network, group(4, over=over, network=network) as members:
        for seed in range(4):
            arrays, total = inputs("float32", 4, 200_000, seed)
            run(members, "all_reduce", arrays)
            for values in arrays:
                np.testing.assert_array_equal(values, total)
        counted = [each.engine.counted() for each in members]
    assert all(each["maps"] and each["replayed"] and each["forged"] and each["malformed"] for each in counted)
    assert not any(each["lost_bytes"] for each in counted)


@has_ipv6
@pytest.mark.parametrize("over", OVER)
def test_sums_go_over_ipv6(over):
    with group(4, over=over, host="::1") as members:
        arrays, total = inputs("float32", 4, 200_000)
        run(members, "all_reduce", arrays)
        for values in arrays:
            np.testing.assert_array_equal(values, total)
        counted = [each.engine.counted() for each in members]
    assert all(each["received"] and not each["over_tcp"] for each in counted)


def test_what_was_lost_counts_as_zero_and_is_reported():
    ranks, count, p = 3, 300_000, 0.3
    with Network(losing(0.2)) as network, group(ranks, tolerance=p, network=network) as members:
        arrays, _ = inputs("float32", ranks, count)
        before = [values.copy() for values in arrays]
        works = [one.all_reduce(values) for one, values in zip(members, arrays, strict=True)]
        assert all(work.wait(300) for work in works)
    expected = np.sum(before, axis=0)
    total = 0
    for owner, work in enumerate(works):
        edges = [block * count // ranks * 4 for block in range(ranks + 1)]
        for source in {loss.source for loss in work.losses}:
            lost = sum(loss.size for loss in work.losses if loss.source == source)
            assert lost <= p * (edges[owner + 1] - edges[owner])
        for loss in work.losses:
            assert edges[owner] <= loss.place < loss.place + loss.size <= edges[owner + 1]
            gap = slice(loss.place // 4, (loss.place + loss.size) // 4)
            expected[gap] -= before[loss.source][gap]
            total += loss.size
    assert total > 0
    for values in arrays:
        np.testing.assert_array_equal(values, expected)


@pytest.mark.parametrize("over", ["ring", "halving_doubling"])
def test_all_ranks_get_the_same_bits_though_sums_lose_packets(over):
    with Network(losing(0.1)) as network, group(4, over=over, tolerance=0.3, network=network) as members:
        arrays, total = inputs("float32", 4, 600_000)
        run(members, "all_reduce", arrays)
        for values in arrays[1:]:
            np.testing.assert_array_equal(values, arrays[0])
        assert (arrays[0] <= total).all()
        assert sum(each.engine.counted()["lost_bytes"] for each in members) > 0


def test_a_server_sums_what_came_and_says_what_did_not():
    ranks, count = 2, 100_000
    with Network(losing(0.1)) as network, engines(ranks + 1, network=network) as made:
        members = [BoundedCollectives(each, rank, ranks, over="ps", tolerance=0.3) for rank, each in enumerate(made)]
        try:
            arrays = [np.ones(count, np.float32) for _ in members]
            arrays[ranks][:] = 0
            works = [one.all_reduce(values) for one, values in zip(members, arrays, strict=True)]
            assert all(work.wait(300) for work in works)
        finally:
            for each in members:
                each.close()
    missing = np.zeros(count)
    for loss in works[ranks].losses:
        missing[loss.place // 4 : (loss.place + loss.size) // 4] += 1
    assert 0 < missing.sum() <= 0.3 * ranks * count
    for values in arrays:
        np.testing.assert_array_equal(values, ranks - missing)


def test_what_small_arrays_do_not_lose_later_ones_may():
    """A hundredth of an array of twenty packets is less than one of them."""
    received = 40 * 20 * PAYLOAD
    with Network(losing(0.05)) as network, group(2, tolerance=0.01, network=network) as members:
        for _ in range(40):
            run(members, "all_reduce", inputs("float32", 2, 2 * 20 * PAYLOAD // 4)[0])
        lost = [each.engine.counted()["lost_bytes"] for each in members]
    assert all(PAYLOAD <= each <= 0.01 * received for each in lost)


def test_vital_extents_and_reliable_arrays_arrive_whole():
    vital = np.array([[0, 4], [100_000, 140_000], [1_199_996, 1_200_000]], np.int64)
    with Network(losing(0.2)) as network, group(2, tolerance=0.5, network=network) as members:
        arrays, total = inputs("float32", 2, 300_000)
        works = [one.all_reduce(values, hint=Hint(vital=vital)) for one, values in zip(members, arrays, strict=True)]
        assert all(work.wait(300) for work in works)
        assert any(work.losses for work in works)
        for first, behind in vital // 4:
            np.testing.assert_array_equal(arrays[0][first:behind], total[first:behind])
        arrays, total = inputs("float32", 2, 300_000)
        run(members, "all_reduce", arrays, hint=Hint(tolerance=0.0))
        np.testing.assert_array_equal(arrays[0], total)


def test_another_part_is_lost_each_time():
    """What is not waited for goes last; were that always the end of an array, it would never be trained."""
    first = []

    def note(packet, rng):
        if packet[14] == 0 and packet[20:22] == b"\0\0":  # data of the first stage
            operation, index = int.from_bytes(packet[16:20], "little"), int.from_bytes(packet[24:28], "little")
            if len(first) == operation:
                first.append(index)
        return [packet]

    with Network(note) as network, group(2, network=network) as members:
        for _ in range(20):
            run(members, "all_reduce", inputs("float32", 2, 2 * 20 * PAYLOAD // 4)[0])
    assert len(first) == 20
    assert len(set(first)) >= 8


@pytest.mark.parametrize(
    ("droppable", "may_be_dropped"), [("packet", range(10)), ("layer", range(6)), ("magnitude", range(0, 6, 2))]
)
def test_what_is_small_in_front_layers_may_be_dropped(droppable, may_be_dropped):
    """Of ten packets for each rank the last four are of back layers; every other one is small."""
    unimportant = set()

    def note(packet, rng):
        if packet[14] == 0 and packet[20:22] == b"\0\0" and not packet[15] & 1:  # data of the first stage
            unimportant.add(int.from_bytes(packet[24:28], "little"))
        return [packet]

    width = PAYLOAD // 4
    values = np.ones(2 * 10 * width, np.float32)
    for packet in range(0, 20, 2):
        values[packet * width : (packet + 1) * width] *= 1e-3
    back = np.array([[first * PAYLOAD, (first + 4) * PAYLOAD] for first in (6, 16)])
    with Network(note) as network, group(2, tolerance=0.3, droppable=droppable, network=network) as members:
        for _ in range(2):
            unimportant.clear()  # the second sum is the first whose packets are compared with those before
            run(members, "all_reduce", [values.copy(), values.copy()], hint=Hint(important=back))
    assert unimportant == set(may_be_dropped)


def test_a_forked_child_closes_nothing_of_engines_that_are_closed():
    """Their descriptors' numbers are given to others."""
    with engines(2) as made:
        numbers = [each._wake for each in made]
        for each in made:
            each.close()
        pipes = [number for _ in range(8) for number in os.pipe()]
        assert set(numbers) <= set(pipes)
        child = os.fork()
        if child == 0:
            try:
                found = 0
                for number in pipes:
                    os.fstat(number)
                found = 1
            finally:
                os._exit(found)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
        for number in pipes:
            os.close(number)


def test_operations_that_share_memory_wait_for_each_other():
    with group(3) as members:
        arrays, total = inputs("int64", 3, 50_000)
        works = [one.all_reduce(values) for one, values in zip(members, arrays, strict=True)]
        works += [one.all_reduce(values) for one, values in zip(members, arrays, strict=True)]
        assert all(work.wait(300) for work in works)
        np.testing.assert_array_equal(arrays[0], 3 * total)


def test_many_operations_are_under_way_at_once():
    with Network(losing(0.05)) as network, group(2, network=network) as members:
        drawn = [inputs("float32", 2, 1000 * (k % 7 + 1), k) for k in range(40)]
        works = [[one.all_reduce(arrays[rank]) for arrays, _ in drawn] for rank, one in enumerate(members)]
        assert all(work.wait(300) for own in works for work in own)
        for arrays, total in drawn:
            np.testing.assert_array_equal(arrays[1], total)


def test_the_sum_of_an_earlier_operation_goes_before_contributions_to_later_ones():
    """Rank 1 is heard when rank 0 already sends the next contribution, which mostly gets lost until the sum goes."""
    later, at_sum = set(), []

    def fate(packet, rng):
        data, of = packet[14] == 0, (packet[12], packet[16], packet[20])  # rank, operation, stage
        if data and of == (0, 1, 0):
            later.add(packet[24:28])
            return [packet] if len(later) < 100 or at_sum else []
        if data and of == (0, 0, 1):
            at_sum.append(len(later))
        return [] if data and of == (1, 0, 0) and len(later) < 100 else [packet]

    with Network(fate) as network, group(2, network=network, blocked=60.0) as members:
        drawn = [inputs("float32", 2, packets * PAYLOAD // 4) for packets in (40, 4000)]
        for work in [one.all_reduce(arrays[one.rank]) for arrays, _ in drawn for one in members]:
            work.wait(300)
        assert 100 <= at_sum[0] < 2000
        for arrays, total in drawn:
            np.testing.assert_array_equal(arrays[1], total)


def test_where_udp_is_blocked_tcp_takes_over_and_each_rank_says_of_whom(caplog):
    with Network(losing(1.0)) as network, group(3, network=network, blocked=0.2) as members:
        arrays, total = inputs("float32", 3, 100_000)
        run(members, "all_reduce", arrays)
        np.testing.assert_array_equal(arrays[2], total)
        assert all(each.engine.counted()["over_tcp"] == 2 for each in members)
        assert all(each.engine.over_tcp() == {0, 1, 2} - {each.rank} for each in members)
    said = {(record.levelname, record.getMessage()) for record in caplog.records}
    why = "they go over TCP until UDP works, and nothing is lost meanwhile; is UDP open between the hosts, and is "
    assert said == {
        ("WARNING", f"rank {one} takes no packets of 8232 bytes over UDP: {why}their MTU the network's?")
        for one in ("0: rank 1", "0: rank 2", "1: rank 0", "1: rank 2", "2: rank 0", "2: rank 1")
    }


@pytest.mark.parametrize("ending", get_args(Ending))
def test_nothing_is_lost_over_tcp_though_it_may_be(ending):
    with (
        Network(losing(1.0)) as network,
        group(2, network=network, blocked=0.2, ending=ending, tolerance=0.3, droppable="packet") as members,
    ):
        for seed in range(3):
            arrays, total = inputs("float32", 2, 100_000, seed)
            works = [each.all_reduce(values) for each, values in zip(members, arrays, strict=True)]
            assert all(work.wait(300) for work in works)
            np.testing.assert_array_equal(arrays[1], total)
            assert not any(work.losses for work in works)


def test_where_udp_is_blocked_half_way_tcp_takes_over():
    with Network(perfect) as network, group(2, network=network, blocked=0.2) as members:
        arrays, total = inputs("float32", 2, 100_000)
        run(members, "all_reduce", arrays)
        network.fate = losing(1.0)
        arrays, total = inputs("float32", 2, 100_000)
        run(members, "all_reduce", arrays)
        np.testing.assert_array_equal(arrays[1], total)


def test_where_only_small_packets_pass_tcp_takes_over():
    with (
        Network(lambda packet, _: [packet] if len(packet) < 1000 else []) as network,
        group(2, network=network, blocked=0.2) as members,
    ):
        arrays, total = inputs("float32", 2, 100_000)
        run(members, "all_reduce", arrays)
        np.testing.assert_array_equal(arrays[1], total)
        assert all(each.engine.counted()["over_tcp"] == 1 for each in members)


def test_a_peer_goes_back_to_udp_once_packets_pass_again_and_says_so(caplog):
    caplog.set_level("INFO", "foretrain")
    with Network(losing(1.0)) as network, group(2, network=network, blocked=0.2) as members:
        arrays, total = inputs("float32", 2, 100_000)
        run(members, "all_reduce", arrays)
        network.fate = perfect
        until(lambda: all(each.engine.counted()["over_udp_again"] for each in members))
        seen = []
        network.fate = lambda packet, _: [seen.append(packet) or packet]
        arrays, total = inputs("float32", 2, 100_000)
        run(members, "all_reduce", arrays)
        np.testing.assert_array_equal(arrays[1], total)
        assert sum(packet[14] == 0 for packet in seen) >= 2 * 100_000 * 4 // PAYLOAD  # of data
        assert not any(each.engine.over_tcp() for each in members)
    said = [record.getMessage() for record in caplog.records if record.levelname == "INFO"]
    assert set(said) == {f"rank {rank}: UDP works again to rank {1 - rank}" for rank in range(2)}


def test_a_network_that_loses_nothing_loses_little():
    def slowly(packet, _):
        time.sleep(0.0005)
        return [packet]

    with Network(slowly) as network, group(2, network=network, tolerance=0.1, droppable="packet") as members:
        lost = 0
        for _ in range(6):
            arrays, _ = inputs("float32", 2, 300_000)
            works = [each.all_reduce(values) for each, values in zip(members, arrays, strict=True)]
            lost += sum(loss.size for work in works if work.wait(300) for loss in work.losses)
        assert lost < 0.02 * 6 * 2 * 600_000  # each rank receives half an array; a rank that hardly runs may lose some


def test_a_rank_that_has_all_may_end_before_the_others():
    with Network(losing(0.5)) as network, group(2, network=network, blocked=30.0) as members:
        arrays, total = inputs("float32", 2, 3)

        def one(rank):
            members[rank].all_reduce(arrays[rank]).wait(300)
            members[rank].close()

        in_threads(2, one)
        np.testing.assert_array_equal(arrays[1], total)


def test_a_lost_rank_is_named_by_all():
    with group(3) as members:
        works = [one.all_reduce(np.ones(100_000, np.float32)) for one in members[:2]]
        members[2].close()
        for work in works:
            with pytest.raises(LinkError, match="rank 2 was lost") as caught:
                work.wait(300)
            assert caught.value.peer == 2
        with pytest.raises(LinkError):
            members[0].all_reduce(np.ones(3, np.float32))


def test_a_silent_rank_is_named_after_the_timeout():
    """Its connection is open, and nobody answers."""
    with Network(losing(1.0)) as network, engines(2, timeout=2.0, network=network, blocked=0.2) as made:
        one = BoundedCollectives(made[0], 0, 2)
        made[1]._library.foretrain_bounded_close(made[1]._handle)
        with pytest.raises(LinkError, match="rank 1 was lost"):
            one.all_reduce(np.ones(100, np.float32)).wait(300)
        one.close()


def test_a_rank_that_has_ended_is_named_by_what_begins_later():
    with group(2, timeout=60.0) as members:
        members[1].close()
        with pytest.raises(LinkError, match="rank 1 was lost"):
            members[0].all_reduce(np.ones(100, np.float32)).wait(300)


def test_closing_ends_what_is_under_way():
    with group(2) as members:
        work = members[0].all_reduce(np.ones(100_000, np.float32))
        assert not work.wait(0.05)
        members[0].close()
        with pytest.raises(LinkError, match="closed on this side"):
            work.wait(300)


def test_two_threads_that_close_free_the_memory_once():
    class Slow:
        """Library whose memory takes long to free."""

        def __init__(self, library):
            self.library, self.freed = library, []

        def __getattr__(self, name):
            return getattr(self.library, name)

        def foretrain_bounded_delete(self, handle):
            self.freed.append(handle)
            time.sleep(0.2)
            self.library.foretrain_bounded_delete(handle)

    with group(2) as members:
        one = members[0].engine
        one._library = slow = Slow(one._library)
        in_threads(2, lambda _: members[0].close())
        assert len(slow.freed) == 1


def test_arrays_that_cannot_be_summed_are_refused():
    with group(1) as (one,):
        with pytest.raises(ConfigError):
            one.all_reduce(np.ones(3, np.complex64))
        with pytest.raises(ConfigError):
            one.all_reduce(np.ones(6, np.float32)[::2])


def test_a_forked_child_leaves_the_parents_sockets_alone():
    with group(2) as members:
        if (child := os.fork()) == 0:
            try:
                members[0].engine._leave()
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        arrays, total = inputs("float32", 2, 1000)
        run(members, "all_reduce", arrays)
        np.testing.assert_array_equal(arrays[0], total)
