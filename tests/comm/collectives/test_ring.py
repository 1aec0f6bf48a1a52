import os
import secrets
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretrain.comm.collectives import RingCollectives, connect_peers, runners
from foretrain.comm.collectives.plan import DOUBLING_LIMIT, KINDS, legs, peers
from foretrain.comm.collectives.runners import SEGMENT
from foretrain.comm.coordinator.link import LinkError
from foretrain.errors import ConfigError

SECRET = bytes(range(32))
PATIENCE = 300.0
"""Seconds until a test that hangs fails instead."""
RANKS = (1, 2, 3, 4, 5)


def sockets():
    """The sockets this process holds open."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{number}"))
        except OSError:  # the descriptor of the listing itself
            continue
    return sorted(name for name in found if name.startswith("socket:"))


@pytest.fixture(autouse=True)
def nothing_is_left_behind():
    before = {*sockets(), *threading.enumerate()}
    yield
    assert {*sockets(), *threading.enumerate()} <= before


def attempts(ranks, secret_of=lambda rank: SECRET, timeout=PATIENCE):
    """What each rank's `connect_peers` does, all at the same time: finished futures."""
    addresses, all_listen = [("", 0)] * ranks, threading.Barrier(ranks)

    def of(rank):
        def exchange(address):
            addresses[rank] = address
            all_listen.wait(PATIENCE)
            return addresses

        return connect_peers("127.0.0.1", exchange, secret_of(rank), rank, ranks, timeout)

    with ThreadPoolExecutor(ranks) as pool:
        return [pool.submit(of, rank) for rank in range(ranks)]


def linked(ranks):
    """The links of each rank."""
    return [attempt.result() for attempt in attempts(ranks)]


@contextmanager
def group(ranks, compiled: bool | None = True):
    """The collectives of all ranks, in this process."""
    with ExitStack() as stack:
        links = linked(ranks)
        yield [
            stack.enter_context(closing(RingCollectives(links[rank], rank, ranks, compiled=compiled)))
            for rank in range(ranks)
        ]


def run(members, operation, arrays, **named):
    """One operation of all ranks, in place."""
    works = [getattr(one, operation)(values, **named) for one, values in zip(members, arrays, strict=True)]
    for work in works:
        assert work.wait(PATIENCE), f"{operation} is not done"


def bits(values):
    """The elements as bfloat16, where NumPy has none."""
    return (np.asarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def inputs(kind, ranks, count, seed=0):
    """Whole numbers, small enough for exact sums in every type; and their sum."""
    drawn = np.random.default_rng(seed).integers(0, 40, (ranks, count))
    make = bits if kind == "bfloat16" else lambda values: values.astype(kind)
    return [make(values) for values in drawn], make(drawn.sum(0))


@pytest.fixture(scope="module", params=[True, False], ids=["native", "python"])
def compiled(request):
    return request.param


@pytest.mark.parametrize("ranks", RANKS)
def test_all_reduce_gives_the_sum_in_every_type_and_size(ranks, compiled):
    with group(ranks, compiled) as members:
        for kind, item in KINDS.items():
            # What is cut into segments is bytes, whatever their type.
            long = (3 * SEGMENT // item + 5, ranks * SEGMENT // item) if kind in ("float32", "bfloat16") else ()
            for count in (0, 1, ranks - 1, ranks, 257, *long):
                arrays, total = inputs(kind, ranks, count)
                run(members, "all_reduce", arrays, bfloat16=kind == "bfloat16")
                for values in arrays:
                    np.testing.assert_array_equal(values, total, f"{kind}, {count} elements")


@pytest.mark.parametrize("ranks", [3, 4])
def test_all_reduce_gives_the_sum_at_any_length(ranks):
    with group(ranks) as members:

        @settings(max_examples=40)
        @given(count=st.integers(0, DOUBLING_LIMIT), seed=st.integers(0, 99), kind=st.sampled_from([*KINDS]))
        def holds(count, seed, kind):
            arrays, total = inputs(kind, ranks, count, seed)
            run(members, "all_reduce", arrays, bfloat16=kind == "bfloat16")
            for values in arrays:
                np.testing.assert_array_equal(values, total)

        holds()


def any_floats(kind, ranks, count):
    """Values whose sums round, overflow, are subnormal or are infinite."""
    rng = np.random.default_rng(7)
    values = rng.standard_normal((ranks, count)) * 10.0 ** rng.integers(-8, 6, (ranks, count))
    with np.errstate(over="ignore"):
        made = [bits(each) if kind == "bfloat16" else each.astype(kind) for each in values]
    made[-1][::101] = bits([np.inf])[0] if kind == "bfloat16" else np.inf
    return made


@pytest.mark.parametrize("kind", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize("count", [1000, 200_003])
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.filterwarnings("ignore:overflow")
def test_all_ranks_get_the_same_bits_compiled_or_not(ranks, count, kind):
    results = []
    for how in (True, False):
        arrays = [values.copy() for values in any_floats(kind, ranks, count)]
        with group(ranks, how) as members:
            run(members, "all_reduce", arrays, bfloat16=kind == "bfloat16")
        results += [values.tobytes() for values in arrays]
    assert len(set(results)) == 1


def widened(patterns):
    """Bits of bfloat16 as single precision."""
    return (patterns.astype(np.uint32) << 16).view(np.float32)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_sums_of_halves_are_those_of_single_precision_rounded_once(compiled):
    first = np.arange(1 << 16, dtype=np.uint16).view(np.float16)  # all there are
    second = np.roll(first, 12345)
    exact = (first.astype(np.float32) + second.astype(np.float32)).astype(np.float16)
    with group(2, compiled) as members:
        run(members, "all_reduce", [first, second])
    usable = ~np.isnan(exact)
    np.testing.assert_array_equal(np.isnan(first), ~usable)
    np.testing.assert_array_equal(first[usable].view(np.uint16), exact[usable].view(np.uint16))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_sums_of_bfloat16_are_the_nearest_ones(compiled):
    first = np.arange(1 << 16, dtype=np.uint16)  # all there are
    second = np.roll(first, 12345)
    exact = widened(first) + widened(second)
    with group(2, compiled) as members:
        run(members, "all_reduce", [first, second], bfloat16=True)
    np.testing.assert_array_equal(np.isnan(widened(first)), np.isnan(exact))
    np.testing.assert_array_equal(widened(first)[np.isinf(exact)], exact[np.isinf(exact)])
    finite = np.isfinite(exact) & np.isfinite(widened(first))
    error = np.abs(widened(first).astype(np.float64) - exact)[finite]
    for neighbour in (first + 1, first - 1):
        away = np.abs(widened(neighbour.astype(np.uint16)).astype(np.float64) - exact)[finite]
        # As near is only the other one of a tie, and then ours is the even one.
        assert np.all((error < away) | (error == away) & (first[finite] % 2 == 0) | np.isnan(away))


@pytest.mark.parametrize("ranks", RANKS)
def test_reduce_scatter_then_all_gather_is_all_reduce(ranks, compiled):
    for count in (0, 3, 100_001):
        arrays, total = inputs("float32", ranks, ranks * count)
        with group(ranks, compiled) as members:
            run(members, "reduce_scatter", arrays)
            for rank, values in enumerate(arrays):
                own = slice(rank * count, (rank + 1) * count)
                np.testing.assert_array_equal(values[own], total[own])
            run(members, "all_gather", arrays)
        for values in arrays:
            np.testing.assert_array_equal(values, total)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_many_operations_are_in_flight_and_end_in_order(ranks):
    counts = [(37 * number) % 5000 * (20 if number % 10 == 0 else 1) for number in range(60)]
    made = [inputs("float32", ranks, count, count) for count in counts]
    with group(ranks) as members:
        works = [[one.all_reduce(arrays[rank]) for arrays, _ in made] for rank, one in enumerate(members)]
        for of_rank in works:
            assert of_rank[-1].wait(PATIENCE)
            assert all(work.wait(0) for work in of_rank), "an earlier one is not done"
    for arrays, total in made:
        for values in arrays:
            np.testing.assert_array_equal(values, total)


@pytest.mark.parametrize("count", [5, 60_000])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_operations_in_flight_may_share_an_array(ranks, count):
    arrays, total = inputs("float64", ranks, ranks * count)
    with group(ranks) as members:
        works = []
        for one, values in zip(members, arrays, strict=True):
            for _ in range(5):
                one.reduce_scatter(values)
                one.all_gather(values)
                works.append(one.all_reduce(values))
        assert all(work.wait(PATIENCE) for work in works)
    for values in arrays:
        np.testing.assert_array_equal(values, total * float(ranks) ** 9)


def test_wait_tells_that_its_time_has_passed():
    with group(2) as (ours, theirs):
        work = ours.all_reduce(np.ones(8))
        assert not work.wait(0)
        assert not work.wait(0.01)
        assert theirs.all_reduce(np.ones(8)).wait(PATIENCE)
        assert work.wait(PATIENCE)


@pytest.mark.parametrize("count", [10, 2_000_000])
@pytest.mark.parametrize("ranks", [2, 3, 4, 5])
def test_a_lost_rank_is_named_to_all_others(ranks, count, compiled):
    lost = ranks - 2
    with group(ranks, compiled) as members:
        works = [one.all_reduce(np.ones(count)) for one in members if one.rank != lost]
        members[lost].close()
        for work in works:
            with pytest.raises(LinkError, match=f"rank {lost} was lost during all_reduce") as caught:
                work.wait(PATIENCE)
            assert caught.value.peer == lost
        for one in members:
            if one.rank != lost:
                with pytest.raises(LinkError, match=f"rank {lost} was lost"):
                    one.all_gather(np.ones(ranks)).wait(PATIENCE)


def test_a_peer_that_has_read_nothing_yet_is_told_of_a_lost_rank(monkeypatch, compiled):
    monkeypatch.setattr("foretrain.comm.collectives.ring.TELLING", PATIENCE)
    with group(5, compiled) as members:
        works = [members[rank].all_reduce(np.ones(10_000_000)) for rank in (4, 0)]
        members[3].close()
        time.sleep(0.05)  # rank 4 fails meanwhile, and the link from rank 0 to rank 1 is full
        works += [members[rank].all_reduce(np.ones(10_000_000)) for rank in (1, 2)]
        for work in works:
            with pytest.raises(LinkError, match="rank 3 was lost"):
                work.wait(PATIENCE)


def test_what_was_summed_before_a_rank_ends_is_there():
    with group(2) as (ours, theirs):
        values = np.ones(1000)
        assert theirs.all_reduce(np.ones(1000)) is not None
        work = ours.all_reduce(values)
        assert work.wait(PATIENCE)
        theirs.close()
        with pytest.raises(LinkError, match="rank 1 was lost"):
            ours.all_reduce(np.ones(3)).wait(PATIENCE)
        assert work.wait(0)
        assert values.sum() == 2000


@pytest.mark.parametrize("count", [10, 3_000_000])
def test_closing_ends_what_is_under_way(count, compiled):
    with group(2, compiled) as (ours, _):
        works = [ours.all_reduce(np.ones(count)) for _ in range(3)]
        ours.close()
        ours.close()
        for work in works:
            with pytest.raises(LinkError, match="closed on this side") as caught:
                work.wait(PATIENCE)
            assert caught.value.peer is None
        with pytest.raises(LinkError, match="closed on this side"):
            ours.all_reduce(np.ones(3))


@pytest.mark.parametrize(
    "values",
    [
        np.ones(6, np.complex64),
        np.ones(6, np.uint16),
        np.ones(6, ">f4"),
        np.ones((2, 3)),
        np.ones(12)[::2],
        np.broadcast_to(np.float32(1), (6,)),
        [1.0, 2.0],
    ],
    ids=["complex", "bits", "byte order", "two dimensions", "gaps", "read-only", "list"],
)
def test_arrays_that_cannot_be_summed_are_refused(values):
    with group(1) as (alone,), pytest.raises(ConfigError, match="values"):
        alone.all_reduce(values)


def test_what_does_not_fit_is_refused():
    with group(2) as (ours, _):
        with pytest.raises(ConfigError, match="not divisible by the number of ranks, 2"):
            ours.reduce_scatter(np.ones(3))
        with pytest.raises(ConfigError, match="not divisible"):
            ours.all_gather(np.ones(3))
        with pytest.raises(ConfigError, match=r"float32.*uint16"):
            ours.all_reduce(np.ones(3, np.float32), bfloat16=True)
    with pytest.raises(ConfigError, match="has none to rank 1 of 2"):
        RingCollectives({}, 0, 2)


def test_a_rank_that_does_not_know_the_secret_is_refused():
    first, second = attempts(2, lambda rank: SECRET if rank == 0 else secrets.token_bytes(32), timeout=3.0)
    with pytest.raises(LinkError, match="rank 0 was not reached by rank 1"):
        first.result()
    with pytest.raises(LinkError, match="it refused us: it has another secret") as caught:
        second.result()
    assert caught.value.peer == 0


def test_a_rank_that_does_not_come_is_named():
    with pytest.raises(LinkError, match="rank 0 was not reached by rank 1, 2"):
        connect_peers("127.0.0.1", lambda address: [address] * 3, SECRET, 0, 3, timeout=0.05)


def test_a_failed_exchange_of_addresses_leaves_nothing():
    def exchange(address):
        raise RuntimeError("no rendezvous")

    with pytest.raises(RuntimeError, match="no rendezvous"):
        connect_peers("127.0.0.1", exchange, SECRET, 0, 2, timeout=1.0)


def test_a_link_with_bytes_of_a_message_is_not_given_up():
    first, second = linked(2)
    with closing(first[1]) as ours, closing(second[0]) as theirs:
        theirs.send(1, body=b"half")
        # All but the last byte: what a receive would find while the rest is under way.
        ours._parse(ours._socket.recv(15))
        with pytest.raises(LinkError, match="in the middle of a message"):
            ours.detach()


def test_a_detached_socket_keeps_what_was_not_read():
    first, second = linked(2)
    with closing(second[0]) as theirs, first[1].detach() as bare:
        assert isinstance(bare, socket.socket)
        theirs.send(9, body=b"later")
        assert bare.recv(12, socket.MSG_WAITALL)[:1] == b"\x09"
        assert bare.recv(5, socket.MSG_WAITALL) == b"later"
        with pytest.raises(LinkError, match="given up"):
            first[1].read()
        first[1].close()
        assert bare.fileno() >= 0
        assert first[1].fileno() == -1


def test_forked_children_hold_no_copy():
    with group(2) as members:
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                held = sum(each.fileno() >= 0 for one in members for each in one._sockets.values())
                for one in members:
                    one.close()
                os.write(writing, b"%d" % held)
            finally:
                os._exit(0)
        os.close(writing)
        with open(reading, "rb") as pipe:
            assert pipe.read() == b"0"
        os.waitpid(child, 0)
        run(members, "all_reduce", [np.ones(5), np.ones(5)])


def test_without_a_compiler_it_runs_in_python_and_says_so(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for cached in (runners.library, runners.library_if_possible):
        cached.cache_clear()
    try:
        with group(2, None) as members:
            arrays, total = inputs("float32", 2, 1000)
            run(members, "all_reduce", arrays)
            np.testing.assert_array_equal(arrays[0], total)
    finally:
        for cached in (runners.library, runners.library_if_possible):
            cached.cache_clear()
    assert [record.message.count("apt install g++") for record in caplog.records] == [1]
    assert not list(tmp_path.rglob("*.unfinished"))


@pytest.mark.process
def test_what_cannot_be_kept_is_compiled_for_this_process(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(runners, "_FLAGS", ("-O0", *runners._FLAGS[1:]))  # in half the time
    runners.library.cache_clear()
    try:
        assert runners.runner(True) is not None
    finally:
        runners.library.cache_clear()


@pytest.mark.parametrize("ranks", [2, 3, 4, 6, 8])
@pytest.mark.parametrize("count", [1, 5, 100_000])
def test_what_one_rank_sends_another_receives(ranks, count):
    plans = [legs("all_reduce", rank, ranks, count, 4) for rank in range(ranks)]
    sent = sorted((rank, leg.to, extent) for rank, plan in enumerate(plans) for leg in plan for extent in leg.sends)
    got = sorted(
        (leg.from_, rank, extent) for rank, plan in enumerate(plans) for leg in plan for extent in leg.receives
    )
    assert sent == got
    for rank, plan in enumerate(plans):
        assert {peer for leg in plan for peer in (leg.to, leg.from_)} <= set(peers(rank, ranks))


def test_a_ring_sends_the_least_that_is_possible():
    [leg] = legs("all_reduce", 1, 4, 1 << 20, 4)
    assert sum(extent.size for extent in leg.sends) == 2 * 3 * (1 << 20)
