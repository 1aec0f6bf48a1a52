"""Plan files: what is written is read back, and what is wrong is named with its remedy."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrain.errors import ConfigError
from foretrain.network import cluster
from foretrain.planner import Auto, SavedPlan, choose, load, requested_schedule, save, saved
from foretrain.planner.plan import Fingerprint, dumps, fingerprint, loads
from foretrain.schedule import POLICIES, spec
from foretrain.workload import zoo
from tests.planner.plans import plan_of
from tests.scenario import specs

TIMES = st.integers(1, 10**15)
COUNTS = st.integers(1, 10**6)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


@st.composite
def plans(draw):
    engine = draw(st.sampled_from(["all_reduce", "ps", "ps_colocated"]))
    made_for = Fingerprint(
        draw(TEXTS), draw(TEXTS), draw(COUNTS), draw(st.integers(0, 10**12)), draw(TIMES), draw(COUNTS), draw(TIMES), 0
    )
    return SavedPlan(
        draw(specs()),
        engine,
        draw(COUNTS) if engine == "ps" else 0,
        draw(st.sampled_from([None, "fp16", "bf16"])),
        draw(TIMES),
        draw(TIMES),
        draw(st.floats(0, 10)),
        made_for,
    )


@given(plans())
def test_what_is_written_is_read_back(plan):
    assert loads(dumps(plan)) == plan


def test_a_choice_is_saved_with_all_its_knobs(tmp_path):
    workload, path = zoo("resnet50"), tmp_path / "plan.toml"
    choice = choose(workload, "4x1xV100@7Gbps")
    save(saved(choice), path)
    plan = load(path)
    assert plan.schedule.settings == choice.schedule.settings
    assert plan.time == choice.time
    assert plan.gain == choice.gain
    assert not plan.differences(plan.made_for, served=False)


@pytest.mark.parametrize(
    ("line", "instead", "words"),
    [
        ('policy = "prophet"', 'policy = "profet"', ("policy", "'profet'", "did you mean 'prophet'")),
        ('policy = "prophet"', "", ("policy", "is missing", "foretrain plan")),
        ('policy = "prophet"', "policy = 3", ("policy", "3", "Expected `str`")),
        ('engine = "all_reduce"', 'engine = "ring"', ("engine", "'ring'", "foretrain plan")),
        ("servers = 0", "servers = 2", ("servers", "2", "contradicts engine 'all_reduce'")),
        ("servers = 0", "sever = 0", ("'sever'", "did you mean 'servers'")),
        ('partition = "2MB"', 'partition = "2"', ("knobs.partition", "'2'", "25MB")),
        ('partition = "2MB"', 'partition = "1B"', ("knobs.partition", "out of range")),
        ('partition = "2MB"', 'partitoin = "2MB"', ("knobs", "did you mean 'partition'")),
        ('iteration = "184ms"', "iteration = 184", ("expected.iteration", "184", "Expected `str`")),
        ('iteration = "184ms"', 'iteration = "0s"', ("expected.iteration", "0s", "184.2ms")),
        ("uncertainty = 0.024", "uncertainty = -1.0", ("expected.uncertainty", "-1.0")),
        ("ranks = 4", "ranks = 0", ("made_for.ranks", "0")),
        ("ranks = 4", "", ("made_for.ranks", "is missing")),
        ("ranks = 4", "ranks =", ("TOML", "does not parse")),
    ],
)
def test_what_is_wrong_is_named_with_its_remedy(tmp_path, line, instead, words):
    path = tmp_path / "plan.toml"
    text = dumps(plan_of())
    assert line in text
    path.write_text(text.replace(line, instead))
    with pytest.raises(ConfigError) as caught:
        load(path)
    for word in ("plan.toml: ", *words):
        assert word in str(caught.value)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match="give the path of a plan file"):
        load(tmp_path / "none.toml")


# ---------------------------------------------------------------- what a schedule may be


def test_what_may_be_written_where_a_schedule_is_named(tmp_path):
    path = tmp_path / "plan.toml"
    save(plan_of(), path)
    assert requested_schedule("auto") == requested_schedule(" Auto ") == Auto()
    assert str(Auto()) == "auto"
    assert requested_schedule("p3(slice=1MB)") == spec("p3(slice=1MB)")
    assert requested_schedule(path) == requested_schedule(str(path)) == plan_of()
    for each in (Auto(), spec("fifo"), plan_of()):
        assert requested_schedule(each) is each


def test_auto_is_no_policy():
    assert "auto" not in POLICIES
    with pytest.raises(ConfigError, match=r"foretrain\.choose"):
        spec("auto")
    with pytest.raises(ConfigError, match="write auto alone"):
        requested_schedule("auto(partition=1MB)")
    with pytest.raises(ConfigError, match="did you mean"):
        requested_schedule("profet")


# ---------------------------------------------------------------- what differs


def test_a_plan_knows_what_it_was_not_made_for():
    workload, place = zoo("resnet50"), cluster("4x1xV100@7Gbps")
    plan = saved(choose(workload, place))
    here = fingerprint(zoo("resnet50", batch=32), place, place.cost, 4)
    (found,) = plan.differences(here)
    assert "computes for" in found
    slow = cluster("2x1xV100@1Gbps,overhead=1ms")
    found = plan.differences(fingerprint(zoo("vgg16"), slow, slow.cost, 2), served=True, compression="fp16")
    assert len(found) == 8
    for word in ("fp16", "parameter server", "32 gradients", "2 ranks", "on the link", "an operation costs"):
        assert any(word in each for each in found)
