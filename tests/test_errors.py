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
    ("value", "problem", "told"),
    [
        (None, "is missing", "rate is missing; mend it"),
        ("", "is missing: nobody knows it", "rate is missing: nobody knows it; mend it"),
        ("", "is not set", "rate is not set; mend it"),
        ("", "is not a rate", "rate: '' is not a rate; mend it"),
        (None, "is not a rate", "rate: None is not a rate; mend it"),
        ([], "is missing", "rate: [] is missing; mend it"),
    ],
)
def test_a_message_on_what_is_missing_shows_no_value(value, problem, told):
    assert str(ConfigError("rate", value, problem, "mend it")) == told


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


SCHEDULES = ["fifo", "prophet", "bytescheduler", "largest_tail_first"]
COMMANDS = ["compare", "completion", "share", "schedule", "search", "grid", "run", "plan", "what-if", "simulate"]
OPTIONS = ["--device", "--html", "--json", "--losses", "--queues", "--schedule", "--schedules", "--sweep", "--trace"]


@pytest.mark.parametrize(
    ("value", "names", "near"),
    [
        ("byte-scheduler", SCHEDULES, ["bytescheduler"]),
        ("PROPHET", SCHEDULES, ["prophet"]),
        ("profet", SCHEDULES, ["prophet"]),
        ("fif", SCHEDULES, ["fifo"]),
        ("scheduler", SCHEDULES, ["bytescheduler"]),  # a part of the name
        ("largest-tail", SCHEDULES, ["largest_tail_first"]),
        ("comapre", COMMANDS, ["compare"]),
        ("whatif", COMMANDS, ["what-if"]),
        ("serach", COMMANDS, ["search"]),
        ("simul", COMMANDS, ["simulate"]),
        ("plans", COMMANDS, ["plan"]),
        ("--devce", OPTIONS, ["--device"]),
        ("--scheduel", OPTIONS, ["--schedule"]),
        ("--scheduler", OPTIONS, ["--schedule", "--schedules"]),
        ("--html-file", OPTIONS, ["--html"]),
        ("vgg61", ["vgg11", "vgg13", "vgg16", "vgg19"], ["vgg16"]),
        ("V10", ["A10", "V100", "T4"], ["V100"]),
        ("tq", ["dp", "tp", "pp"], ["tp"]),
    ],
)
def test_near_names_come_first(value, names, near):
    told = " or ".join(repr(name) for name in near)
    assert str(unknown("name", value, names)) == (
        f"name: {value!r} is unknown; did you mean {told}? known: {', '.join(sorted(names))}"
    )


@pytest.mark.parametrize(
    ("value", "names"),
    [
        ("tcsh", ["bash", "fish", "zsh"]),
        ("--devce", ["--trace", "--sweep", "--queues"]),
        ("--cluster", OPTIONS),
        ("--jobs", OPTIONS),
        ("workers", ["servers", "rate"]),
        ("train", COMMANDS),
        ("co", COMMANDS),
    ],
)
def test_far_names_are_not_suggested(value, names):
    assert "did you mean" not in str(unknown("name", value, names))


@pytest.mark.parametrize("value", ["", "zzz", None, 5, ["x"]])
def test_without_near_names_all_are_listed(value):
    assert str(unknown("schedule", value, ["fifo", "p3"])) == f"schedule: {value!r} is unknown; known: fifo, p3"


def test_a_stall_lists_twelve_of_those_who_wait_and_keeps_all():
    error = StallError("stuck:", (f"task {i}" for i in range(40)))
    assert len(error.waits) == 40
    assert str(error).splitlines()[-2:] == ["  - task 11", "  (and 28 more)"]
