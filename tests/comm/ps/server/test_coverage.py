"""Coverage against a table of bytes and workers."""

from hypothesis import given
from hypothesis import strategies as st

from foretrain.comm.ps.server.coverage import Coverage

SIZE, WORKERS = 24, 3

pushes = st.lists(
    st.tuples(st.integers(0, WORKERS - 1), st.integers(0, SIZE - 1), st.integers(1, SIZE)).map(
        lambda push: (push[0], push[1], min(SIZE, push[1] + push[2]))
    ),
    max_size=30,
)


def bytes_of(ranges):
    found = [byte for start, end in ranges for byte in range(start, end)]
    assert len(found) == len(set(found))
    assert found == sorted(found)
    return set(found)


@given(pushes)
def test_what_is_new_and_what_is_complete(pushed):
    coverage, had = Coverage(SIZE, (1 << WORKERS) - 1), [set() for _ in range(WORKERS)]
    for worker, start, end in pushed:
        before = set.intersection(*had)
        asked = set(range(start, end))
        assert bytes_of(coverage.has(worker, start, end)) == had[worker] & asked
        assert bytes_of(coverage.complete(start, end)) == before & asked
        new, complete = coverage.add(worker, start, end)
        assert bytes_of(new) == asked - had[worker]
        had[worker] |= asked
        assert bytes_of(complete) == set.intersection(*had) - before
    missing = {worker: SIZE - len(has) for worker, has in enumerate(had) if len(has) < SIZE}
    assert coverage.missing() == missing
    assert coverage.whole == (not missing)


@given(pushes, st.integers(0, WORKERS - 1), pushes)
def test_without_a_worker(pushed, lost, later):
    coverage, had = Coverage(SIZE, (1 << WORKERS) - 1), [set() for _ in range(WORKERS)]
    for worker, start, end in pushed:
        coverage.add(worker, start, end)
        had[worker] |= set(range(start, end))
    before = set.intersection(*had)
    others = [has for worker, has in enumerate(had) if worker != lost]
    assert bytes_of(coverage.remove_worker(lost)) == set.intersection(*others) - before
    for worker, start, end in later:
        if worker != lost:
            old = set.intersection(*others)
            _, complete = coverage.add(worker, start, end)
            had[worker] |= set(range(start, end))
            assert bytes_of(complete) == set.intersection(*others) - old
    assert coverage.whole == (len(set.intersection(*others)) == SIZE)


@given(pushes)
def test_stretches_alike_are_one(pushed):
    coverage = Coverage(SIZE, (1 << WORKERS) - 1)
    for worker, start, end in pushed:
        coverage.add(worker, start, end)
    for worker in range(WORKERS):
        coverage.add(worker, 0, SIZE)
    assert coverage.complete(0, SIZE) == [(0, SIZE)]
    assert len(coverage._masks) == 1
