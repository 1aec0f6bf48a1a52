"""HDRM in the simulator: one flow on a link direction at any moment, where ranks are spread evenly."""

import numpy as np
import pytest

from foretrain.collective import build, hdrm_mapping
from foretrain.network.fluid import Fluid
from foretrain.network.program import place
from foretrain.network.routing import router
from foretrain.network.topology.notation import topology
from foretrain.units import SECOND


@pytest.mark.parametrize(("switches", "hosts"), [(4, 2), (6, 3), (8, 4), (10, 5), (6, 2), (12, 3)])
def test_never_two_flows_on_a_link_between_switches(switches: int, hosts: int) -> None:
    ranks = switches * hosts
    routes = router(topology(f"bigraph:{switches}x{hosts}@100Gbps"), "ecmp")
    network = routes.topology
    plan = build("hdrm", "all_reduce", ranks, switches=switches, hosts=hosts)
    program = place(plan, 10**8, routes, hdrm_mapping(switches, hosts).host)
    kinds = np.array([node.kind == "switch" for node in network.nodes])
    between = np.flatnonzero(kinds[network.source] & kinds[network.target])
    fluid = Fluid(network.capacity)
    handle = fluid.add(program)
    flow_of = np.repeat(np.arange(len(program)), np.diff(program.paths.first))
    most = 0
    while handle.end is None:
        fluid.advance(int(np.ceil(fluid.next_event())))
        if handle.end is None:
            moving = fluid.rates(handle)[flow_of] > 0
            most = max(most, int(np.bincount(program.paths.links[moving], minlength=network.links)[between].max()))
    assert most == 1
    least = 2 * (ranks - 1) / ranks * 1e8 / 12.5e9 * SECOND
    assert handle.finish.max() == pytest.approx(least, rel=0.01)
