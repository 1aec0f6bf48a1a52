import numpy as np
import pytest

from foretrain.errors import ConfigError
from foretrain.network import routing
from foretrain.network.routing import Adaptive, Ecmp, Shortest, Spray, Static, router
from tests.network.routing.networks import leaf_spine


def test_each_name_is_a_policy():
    topology = leaf_spine()
    made = {
        name: type(router(topology, name, table={} if name == "static" else None))
        for name in ("shortest", "ecmp", "static", "spray", "adaptive")
    }
    assert [*made.values()] == [Shortest, Ecmp, Static, Spray, Adaptive]
    assert isinstance(router(topology), Ecmp)


def test_options_reach_their_policy():
    topology = leaf_spine()
    ecmp = router(topology, seed=3, polarised=True)
    assert isinstance(ecmp, Ecmp)
    assert (ecmp.seed, ecmp.polarised) == (3, True)
    static = router(topology, "static", table={}, fallback="adaptive", load=np.ones(topology.links))
    assert isinstance(static, Static)
    assert isinstance(static.fallback, Adaptive)
    assert static.fallback.load.all()


def test_a_name_that_is_nearly_right_is_said():
    with pytest.raises(ConfigError, match=r"routing: 'ecpm' is unknown; did you mean 'ecmp'\?"):
        router(leaf_spine(), "ecpm")


@pytest.mark.parametrize(
    ("policy", "options", "message"),
    [
        ("shortest", {"polarised": True}, "polarised: 'shortest' does not have this option"),
        ("ecmp", {"table": {}}, "table: 'ecmp' does not have this option, which is one of static"),
        ("ecmp", {"load": np.ones(3)}, "one of adaptive"),
        ("static", {}, "lists no paths"),
        ("static", {"table": {}, "fallback": "static"}, "is the policy itself"),
        ("static", {"table": {}, "fallback": "adaptiv"}, "did you mean 'adaptive'"),
    ],
)
def test_options_of_other_policies_are_refused(policy, options, message):
    with pytest.raises(ConfigError, match=message):
        router(leaf_spine(), policy, **options)


def test_no_function_hides_a_module():
    for name in routing.__all__:
        assert not hasattr(getattr(routing, name), "__path__")
        assert getattr(routing, name).__module__.split(".")[-1] != name
