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
def test_new_and_complete_ranges_match_a_table_of_bytes(pushed):
    coverage, had = Coverage(SIZE, (1 << WORKERS) - 1), [set() for _ in range(WORKERS)]
    for worker, start, end in pushed:
        before = set.intersection(*had)
        asked = set(range(start, end))
        assert bytes_of(coverage.complete(start, end)) == before & asked
        new, complete = coverage.add(worker, start, end)
        assert bytes_of(new) == asked - had[worker]
        had[worker] |= asked
        assert bytes_of(complete) == set.intersection(*had) - before
    missing = {worker: SIZE - len(has) for worker, has in enumerate(had) if len(has) < SIZE}
    assert coverage.missing() == missing
    assert coverage.whole == (not missing)
    for worker in range(WORKERS):
        coverage.add(worker, 0, SIZE)
    assert coverage.complete(0, SIZE) == [(0, SIZE)]
    assert len(coverage._masks) == 1  # equal ranges are joined


@given(pushes, st.integers(0, WORKERS - 1), pushes)
def test_removing_a_worker_completes_what_all_others_have_pushed(pushed, lost, later):
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
