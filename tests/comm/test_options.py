"""Transports and timeouts of `attach`: values are checked where they are made, contradictions cannot be written."""

import pickle
from fractions import Fraction

import numpy as np
import pytest

from foretrain.comm.options import AllReduce, BoundedLoss, ParameterServer, Timeouts, as_transport, refuse_torch_only
from foretrain.errors import ConfigError


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: AllReduce("replays"), "order: 'replays' is unknown; did you mean 'replay'"),
        (lambda: AllReduce(check_every=-1), "check_every: -1 is not a number of steps"),
        (lambda: AllReduce(check_every=2.5), "check_every: 2.5 is not a number of steps"),
        (lambda: BoundedLoss(over="ring", missing="rescale"), "missing: 'rescale' needs whole contributions"),
        (lambda: BoundedLoss(over="ring", ending="early_close"), "ending: 'early_close' needs whole contributions"),
        (lambda: BoundedLoss(ending="early"), "ending: 'early' is unknown; did you mean 'early_close'"),
        (lambda: BoundedLoss(hadamard=1), "hadamard: 1 is neither True nor False"),
        (lambda: BoundedLoss(1.0), "tolerance: 1.0 is no share of the bytes"),
        (lambda: BoundedLoss(True), "tolerance: True is no share of the bytes"),
        (lambda: BoundedLoss(0, ending="adaptive_timeout"), "ending: 'adaptive_timeout' is of no use where nothing"),
        (
            lambda: BoundedLoss(0, missing="feedback"),
            "missing: 'feedback' is of no use where nothing may be lost; writ",
        ),
        (lambda: BoundedLoss(over="star"), "over: 'star' is unknown"),
        (lambda: BoundedLoss(updates="nobody"), "updates: 'nobody' is unknown"),
        (lambda: BoundedLoss(over="ring", updates="servers"), "updates: 'servers' needs a server, and over='ring' has"),
        (lambda: BoundedLoss("auto", "ps", updates="servers"), "tolerance: 'auto' compares sums, which ranks do not"),
        (
            lambda: BoundedLoss(over="ps", hadamard=True, updates="servers"),
            "hadamard: True transforms sums back on the",
        ),
        (
            lambda: refuse_torch_only(BoundedLoss(over="ps", updates="servers")),
            "transport.updates: 'servers' runs PyTorch's optimizers on the servers; write updates='workers', or use",
        ),
        (lambda: BoundedLoss(droppable="all"), "droppable: 'all' is unknown"),
        (lambda: BoundedLoss(reliable_steps=-1), "reliable_steps: -1 is no number"),
        (lambda: ParameterServer(updates="nobody"), "updates: 'nobody' is unknown"),
        (lambda: ParameterServer(consistency="ssp(-1)"), r"consistency: 'ssp\(-1\)' is unknown"),
        (lambda: ParameterServer(consistency="async", updates="workers"), "'async' cannot be with optimizers on the"),
        (lambda: ParameterServer(elastic=1), "elastic: 1 is neither True nor False"),
        (lambda: ParameterServer("here").endpoints(), "addresses: 'here' is no address"),
        (lambda: Timeouts(-1.0), "timeouts.peer: -1.0 is not a positive time"),
        (lambda: Timeouts(stall="soon"), "timeouts.stall: 'soon' is not a time"),
        (lambda: as_transport("rings"), "transport: 'rings' is unknown"),
        (lambda: as_transport("bounded(share=0.1)"), "transport: 'share' is unknown"),
        (lambda: as_transport("bounded(over=ps, over=ring)"), "transport.over: 'ring' is there twice"),
        (lambda: as_transport("bounded(tolerance=few)"), "tolerance: 'few' is no share of the bytes"),
        (lambda: as_transport("bounded(reliable_steps=1.5)"), "reliable_steps: 1.5 is no number"),
    ],
)
def test_wrong_options_are_refused(make, said):
    with pytest.raises(ConfigError, match=said):
        make()


def test_transports_have_short_forms_and_asynchronous_updates_run_on_the_servers():
    assert as_transport("all_reduce") == AllReduce()
    assert as_transport("ps") == ParameterServer()
    assert as_transport("bounded") == BoundedLoss()
    endings = {"missing": "feedback", "ending": "adaptive_timeout", "hadamard": True}
    for each in (BoundedLoss(1e-5, "ring", "layer", "zero", 3, 4), BoundedLoss("auto", **endings)):
        assert as_transport(str(each)) == each
    assert as_transport(AllReduce("replay")) == AllReduce("replay")
    assert ParameterServer().updates == "workers"
    assert ParameterServer(consistency="ssp(3)").updates == "servers"


def test_text_of_bounded_loss_says_what_differs_from_the_defaults():
    assert as_transport("bounded()") == BoundedLoss()
    assert as_transport("bounded(over=ps, updates=servers)") == BoundedLoss(over="ps", updates="servers")
    assert as_transport("bounded(tolerance=3.5%)") == BoundedLoss(0.035)
    asked = as_transport("bounded(tolerance=auto, ending=early_close, reliable_steps=3, hadamard=true)")
    assert asked == BoundedLoss("auto", reliable_steps=3, ending="early_close", hadamard=True)


@pytest.mark.parametrize("number", [np.float64(0.01), np.float32(0.01), Fraction(1, 100), 0])
def test_a_tolerance_is_any_number(number):
    transport = BoundedLoss(number)
    assert type(transport.tolerance) is float
    assert transport.tolerance == pytest.approx(float(number))
    assert as_transport(str(transport)) == transport


def test_addresses_are_given_or_from_the_environment(monkeypatch):
    monkeypatch.setenv("FORETRAIN_SERVERS", "10.0.0.5:5555, 10.0.0.6:5556")
    assert ParameterServer().endpoints() == (("10.0.0.5", 5555), ("10.0.0.6", 5556))
    assert ParameterServer("host:1").endpoints() == (("host", 1),)
    monkeypatch.delenv("FORETRAIN_SERVERS")
    with pytest.raises(ConfigError, match="FORETRAIN_SERVERS: '' names no server"):
        ParameterServer().endpoints()


def test_times_are_seconds_or_text_and_values_travel():
    assert Timeouts("1.5s", "30min") == Timeouts(1.5, 1800)
    for value in (Timeouts("2s"), ParameterServer("host:1", consistency="async"), AllReduce("replay")):
        assert pickle.loads(pickle.dumps(value)) == value
