"""Messages of the coordinator survive the wire."""

from hypothesis import given

from foretrain.comm.coordinator.protocol import pack_spec, unpack_spec
from foretrain.schedule import Spec
from tests.scenario import specs


@given(specs())
def test_a_schedule_survives_a_knobs_message(plan: Spec):
    assert unpack_spec(pack_spec(plan)) == plan
