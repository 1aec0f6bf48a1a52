import pytest
from torch.distributed.run import get_args_parser

from foretrain.cli.arguments import script_of, without_separator
from foretrain.cli.simulate import run_command
from foretrain.errors import ConfigError


@pytest.mark.parametrize(
    ("option", "value", "remedy"),
    [
        ("tokens", "0", "write the tokens of all ranks"),
        ("steps", "0", "write 1 or more"),
        ("live", "some", "write e.g. auto"),
    ],
)
def test_options_are_checked_before_anything_runs(option, value, remedy):
    with pytest.raises(ConfigError, match=remedy) as error:
        run_command([f"--{option}", value, "--", "train.py"])
    assert error.value.field == option


def test_outputs_are_checked_before_anything_runs(tmp_path):
    with pytest.raises(ConfigError, match="is a folder"):
        run_command(["--html", str(tmp_path), "--", "train.py"])
    with pytest.raises(ConfigError, match="does not exist"):
        run_command(["--trace", str(tmp_path / "none" / "t.json"), "--", "train.py"])
    (tmp_path / "t").write_text("mine")
    with pytest.raises(ConfigError, match="is a file"):
        run_command(["--trace", str(tmp_path / "t"), "--", "train.py"])
    # A folder is where traces may go; the script is what is missing here.
    with pytest.raises(ConfigError, match="is no file"):
        run_command(["--trace", str(tmp_path), "--cluster", "dgx-h100:1", "--", str(tmp_path / "train.py")])


def test_a_curve_of_loads_that_nothing_would_show_is_refused():
    with pytest.raises(ConfigError, match="add --html") as error:
        run_command(["--experts-curve", "--", "train.py"])
    assert error.value.field == "experts_curve"


@pytest.mark.parametrize("words", ["-m train -- --depth=4", "train.py -- -- b", "train.py --a -- b", "train.py"])
def test_a_script_gets_the_arguments_that_torchrun_hands_on(words):
    told = get_args_parser().parse_args(words.split())
    script, module = script_of(words.split(), False, "")
    assert (without_separator(script), module) == ([told.training_script, *told.training_script_args], told.module)
