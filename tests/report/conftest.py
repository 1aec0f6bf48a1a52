"""One comparison for all pictures: it takes a moment."""

import pytest

from foretrain.comparison import Comparison, compare, sweep
from foretrain.workload import zoo

PLACE = "4x2xV100@10Gbps,ps=2"


@pytest.fixture(scope="session")
def comparison() -> Comparison:
    workload = zoo("alexnet", batch=16)
    names = ("ddp", "p3(slice=4MB)", "bytescheduler(partition=1MB)", "bytescheduler(partition=4MB)")
    table = compare(workload, PLACE, names, tuned=False)
    return table.with_sweep(sweep(workload, PLACE, names[:2], "rate=1Gbps:100Gbps", points=3, tuned=False))
