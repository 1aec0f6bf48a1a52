import pytest

from foretrain import errors
from foretrain.errors import ConfigError, ForetrainError, StallError, unknown


def test_every_error_is_documented_and_one_except_catches_all():
    found = [one for one in vars(errors).values() if isinstance(one, type) and issubclass(one, Exception)]
    assert len(found) == 8
    assert all(issubclass(one, ForetrainError) and one.__name__ in (errors.__doc__ or "") for one in found)
    assert issubclass(ConfigError, ValueError)
    assert issubclass(errors.MissingExtra, ImportError)


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
    assert str(inner.at("links").at("cluster.toml")).startswith("cluster.toml: links")


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


def test_a_stall_lists_twelve_of_those_who_wait_and_keeps_all():
    error = StallError("stuck:", (f"task {i}" for i in range(40)))
    assert len(error.waits) == 40
    assert str(error).splitlines()[-2:] == ["  - task 11", "  (and 28 more)"]
