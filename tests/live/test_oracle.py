"""The executor against the longest path in the graph of what waits for what."""

import networkx as nx
from hypothesis import given
from hypothesis import strategies as st

from foretrain.live.event_log import DEVICE, ELAPSED
from tests.live.player import shuffled

TOOK = 23
STREAMS = 3

runs = st.tuples(st.just("run"), st.integers(0, STREAMS - 1), st.integers(0, 50), st.integers(0, 80))
waits = st.tuples(st.just("wait"), st.integers(0, STREAMS - 1), st.integers(0, STREAMS - 1))
host = st.tuples(st.just("host"), st.integers(0, 60))
meets = st.tuples(st.just("meet"), st.integers(0, STREAMS - 1))


@st.composite
def logs(draw):
    """What each of some ranks does, with as many collectives on each, but on any streams."""
    ranks = draw(st.integers(1, 3))
    private = st.lists(runs | waits | host, max_size=6)
    registry = draw(st.integers(0, 4))
    return [
        [step for _ in range(registry) for step in [*draw(private), draw(meets)]] + draw(private) for _ in range(ranks)
    ]


def longest_paths(logs):
    """When each rank's recorded events happen: nodes are ends of records, weights how much later they are."""
    graph = nx.DiGraph()
    graph.add_node("start")

    def after(node, *befores):
        for before, weight in befores:
            known = graph.edges.get((before, node), {"weight": weight})["weight"]
            graph.add_edge(before, node, weight=max(known, weight))
        return node

    events = [[] for _ in logs]
    for rank, log in enumerate(logs):
        last = dict.fromkeys(range(STREAMS), "start")
        clock, met = 0, 0
        for i, step in enumerate(log):
            node = (rank, i)
            if step[0] == "run":
                _, stream, work, gap = step
                last[stream] = after(node, (last[stream], work), ("start", clock + gap + work))
            elif step[0] == "host":
                clock += step[1]
            elif step[0] == "meet":
                after(("meet", met), (last[step[1]], 0), ("start", clock))
                last[step[1]] = after(node, (("meet", met), TOOK))
                met += 1
            else:
                _, stream, other = step
                recorded = after((node, "event"), (last[other], 0), ("start", clock))
                events[rank].append(recorded)
                last[other] = recorded
                last[stream] = after(node, (last[stream], 0), (recorded, 0))
    when = {"start": 0}
    for node in nx.topological_sort(graph):
        when[node] = max((when[b] + graph.edges[b, node]["weight"] for b in graph.predecessors(node)), default=0)
    return [[when[event] for event in mine] for mine in events]


def program_of(log, found):
    def program(rank):
        zero = rank.record(9)
        events = []
        for step in log:
            if step[0] == "run":
                # Copies, for the others share the GPU.
                rank.run(step[1], step[2], floor=rank.clock + step[3] + step[2], copied=step[2])
            elif step[0] == "host":
                rank.clock += step[1]
                yield rank.frame()
            elif step[0] == "meet":
                rank.call(step[1], "all_reduce", 4)
            else:
                events.append(rank.record(step[2]))
                rank.wait(step[1], events[-1])
        yield rank.ask(DEVICE)
        for event in events:
            found.append((yield rank.ask(ELAPSED, a=zero, b=event)).value)

    return program


@given(logs(), st.integers(0, 10**6))
def test_streams_are_longest_paths(logs, seed):
    found = [[] for _ in logs]
    shuffled(seed, *map(program_of, logs, found), duration=TOOK)
    assert found == longest_paths(logs)


@given(logs(), st.integers(0, 10**6))
def test_slowdown_makes_nothing_earlier_and_one_of_next_to_nothing_changes_next_to_nothing(logs, seed):
    for slowdown, most in ((1.6, float("inf")), (1 + 1e-12, 2 * 40)):  # each run is rounded up to 1 ps
        found = [[] for _ in logs]
        shuffled(seed, *map(program_of, logs, found), duration=TOOK, slowdown=slowdown)
        for mine, exact in zip(found, longest_paths(logs), strict=True):
            assert all(0 <= time - bound <= most for time, bound in zip(mine, exact, strict=True))
