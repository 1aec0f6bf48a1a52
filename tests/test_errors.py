import pytest

from foretrain import errors
from foretrain.errors import ConfigError, ForetrainError, MissingExtra, RecordError, ScheduleError, StallError, unknown


def test_the_tree_is_the_documented_one():
    found = {
        name: value.__bases__
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, Exception)
    }
    assert found == {
        "ForetrainError": (Exception,),
        "ConfigError": (ForetrainError, ValueError),
        "ScheduleError": (ForetrainError,),
        "StallError": (ForetrainError,),
        "RecordError": (ForetrainError,),
        "PeerLost": (ForetrainError,),
        "Disagreement": (ForetrainError,),
        "MissingExtra": (ForetrainError, ImportError),
    }
    assert all(name in (errors.__doc__ or "") for name in found)


def test_a_config_error_says_what_was_wrong_the_value_and_what_to_do():
    error = ConfigError("rate", "100Gb", "is not a rate", "write e.g. '100Gbps'")
    assert str(error) == "rate: '100Gb' is not a rate; write e.g. '100Gbps'"
    assert (error.field, error.value) == ("rate", "100Gb")


@pytest.mark.parametrize(
    ("field", "outer", "path"),
    [
        ("rate", "links", "links.rate"),
        ("rate", "cluster.toml", "cluster.toml: rate"),
        ("[3].rate", "links", "links[3].rate"),
    ],
)
def test_a_path_grows_on_the_way_out(field, outer, path):
    inner = ConfigError(field, 1, "is wrong", "mend it")
    error = inner.at(outer)
    assert error.field == path
    assert (error.value, error.problem, error.remedy) == (1, "is wrong", "mend it")
    assert inner.field == field


def test_paths_nest():
    error = ConfigError("rate", 1, "is wrong", "mend it").at("links").at("cluster.toml")
    assert str(error) == "cluster.toml: links.rate: 1 is wrong; mend it"


@pytest.mark.parametrize(
    ("value", "near"),
    [
        ("byte-scheduler", "did you mean 'bytescheduler'?"),
        ("PROPHET", "did you mean 'prophet'?"),
        ("fif", "did you mean 'fifo'?"),
        ("scheduler", "did you mean 'bytescheduler'?"),  # a part of the name
        ("largest-tail", "'largest_tail_first'"),
    ],
)
def test_near_names_come_first(value, near):
    error = unknown("schedule", value, ["fifo", "prophet", "bytescheduler", "largest_tail_first"])
    assert near in str(error)
    assert str(error).endswith("known: bytescheduler, fifo, largest_tail_first, prophet")


@pytest.mark.parametrize("value", ["", "zzz", None, 5, ["x"]])
def test_without_near_names_all_are_listed(value):
    assert str(unknown("schedule", value, ["fifo", "p3"])) == f"schedule: {value!r} is unknown; known: fifo, p3"


def test_a_stall_lists_who_waits():
    error = StallError("step 0 cannot go on:", ["layer 'a' waits", "task 'b' waits"])
    assert str(error).splitlines() == ["step 0 cannot go on:", "  - layer 'a' waits", "  - task 'b' waits"]
    assert error.waits == ("layer 'a' waits", "task 'b' waits")


def test_a_long_stall_is_cut_but_kept():
    error = StallError("stuck:", (f"task {i}" for i in range(40)))
    assert len(error.waits) == 40
    assert str(error).splitlines()[-2:] == ["  - task 11", "  (and 28 more)"]


def test_a_missing_extra_names_the_command():
    error = MissingExtra("torch", "torch", "recording")
    assert str(error) == "recording needs the package 'torch'; install it with: pip install 'foretrain[torch]'"


@pytest.mark.parametrize(
    "error", [ScheduleError("x"), RecordError("x"), StallError("x", ()), MissingExtra("a", "b", "c")]
)
def test_one_except_catches_all(error):
    with pytest.raises(ForetrainError):
        raise error
