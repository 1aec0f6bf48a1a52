"""Spaces of recipes: what they expand to, what a smaller run is, and how wrong ones are refused."""

import re
import tomllib
from pathlib import Path

import numpy as np
import pytest
from msgspec import structs

from foretrain.errors import ConfigError
from foretrain.recipe_search.space import PRESETS, declared, evaluate, expand
from tests.examples.torchrun import ROOT

SPACE = {
    "values": {"tp": [1, 2, 4], "pp": [1, 2], "recompute": ["", "--recompute full"]},
    "derived": {"dp": "world // (tp * pp)"},
    "require": ["tp * pp <= world"],
    "flags": {"batch": "--batch"},
    "tokens": "batch * 10",
    "short_from": 0,
    "short": {"batch": "dp * pp"},
}
SCRIPT = ("train.py", "--batch", "64", "--tp={tp}", "--pp", "{pp}", "{recompute}")


def test_a_space_is_the_product_of_its_values_that_meets_its_conditions():
    space = expand(declared(SPACE), SCRIPT, world=4, gpus=4)
    assert space.points == 12
    assert len(space.recipes) == 10
    assert space.excluded == {"tp * pp <= world": 2}
    assert space.recipes[3].argv == ("train.py", "--batch", "64", "--tp=1", "--pp", "2", "--recompute", "full")
    assert space.recipes[2].argv[-1] == "2"
    assert str(space.recipes[2]) == "tp=1, pp=2, recompute=none"
    assert space.recipes[0].tokens == 640


def test_smaller_runs_extend_linear_accounts_exactly():
    space = expand(declared(SPACE | {"short": {"batch": "dp * pp", "tp": "1"}}), SCRIPT, world=16, gpus=8)
    recipe = next(one for one in space.recipes if one.values["tp"] == 4 and one.values["pp"] == 2)

    def account(batch: float, tp: float) -> float:
        return 3 + 2 * batch + 5 * tp + 7 * batch * tp

    total = 0.0
    for short in space.short_runs(recipe):
        batch, tp = float(short.argv[2]), float(short.argv[3].removeprefix("--tp="))
        total += short.weight * account(batch, tp)
    assert total == pytest.approx(account(64, 4))


def test_a_recipe_that_is_small_itself_has_no_smaller_run():
    space = expand(declared(SPACE), ("train.py", "--batch", "2", *SCRIPT[3:]), world=4, gpus=4)
    assert not any(space.short_runs(recipe) for recipe in space.recipes)


def test_a_flag_in_the_command_line_fixes_a_value():
    space = expand(declared(SPACE | {"flags": {"tp": "--tp"}, "tokens": None, "short": {}}),
                   ("train.py", "--tp", "2", "{pp}", "{recompute}"), world=4, gpus=4)  # fmt: skip
    assert space.varying == ("pp", "recompute")
    assert {recipe.argv[2] for recipe in space.recipes} == {"2"}


def test_values_and_flags_reach_the_script_as_they_were_written():
    space = {"values": {"name": ['{"tp":1}', "a\\b", "it's", "'two words' and more"]}, "flags": {"rate": "--rate"}}
    recipes = expand(
        declared(space), ("train.py", "--rate", "1e-5", "--out={recipe}", "{recipe}", "{name}"), 4, 4
    ).recipes
    assert {recipe.argv[:3] for recipe in recipes} == {("train.py", "--rate", "1e-5")}
    assert [recipe.argv[5:] for recipe in recipes] == [
        ('{"tp":1}',), ("a\\b",), ("it's",), ("two words", "and", "more")
    ]  # fmt: skip
    assert all(recipe.argv[3] == f"--out={recipe.argv[4]}" for recipe in recipes)


def test_numpys_values_are_numbers():
    space = expand(
        declared(SPACE | {"values": {**SPACE["values"], "tp": np.array([1, 2]), "pp": [np.int64(1)]}}), SCRIPT, 4, 4
    )
    assert {recipe.values["tp"] for recipe in space.recipes} == {1, 2}
    assert str(ConfigError("field", np.array([1, 2]), "is wrong", "correct it")).startswith(
        "field: array([1, 2]) is wrong"
    )


@pytest.mark.parametrize(
    ("change", "script", "words"),
    [
        ({"require": ["tp > 8"]}, SCRIPT, "none meets all conditions: 12 would without 'tp > 8'"),
        ({"require": ["tq > 8"]}, SCRIPT, "require: 'tq' is unknown; did you mean 'tp'"),
        ({"require": ["__import__('os')"]}, SCRIPT, "is not allowed in an expression"),
        ({"require": ["tp >"]}, SCRIPT, "is no expression"),
        ({"derived": {"dp": "world // 0"}}, SCRIPT, "cannot be computed"),
        ({"values": {"tp": []}}, SCRIPT, "is no list of values"),
        ({"memory": {"grows": ["tq"]}}, SCRIPT, "memory.grows: 'tq' is unknown"),
        ({"valuse": {}}, SCRIPT, "unknown field `valuse`"),
        ({"batch": "global"}, SCRIPT, "batch: 'global' is unknown"),
        ({"steps": 1}, SCRIPT, "is too few"),
        ({}, (*SCRIPT, "{ep}"), "script: '{ep}' is unknown"),
        ({}, SCRIPT[:-1], "values.recompute: .* is used nowhere in the command line"),
        ({"short": {"batch": "dp / 3"}}, SCRIPT, "is no whole number"),
        ({"derived": {"dp": "2**tp"}}, SCRIPT, r"derived.dp: '2\*\*tp' has the operator Pow, which is not allowed"),
        ({"values": {"micro-batch": [1]}}, SCRIPT, "values: 'micro-batch' is no name; names have letters"),
        ({"derived": {"world": "8"}}, SCRIPT, "derived: 'world' already names the job's GPUs"),
        ({"values": {**SPACE["values"], "recompute": ["", "--note it's 1"]}}, SCRIPT, "values.recompute: .*No closing"),
        ({"tokens": "batch * (2 - tp)"}, SCRIPT, r"tokens: 'batch \* \(2 - tp\)' gives 0 for tp=2, pp=1, .*write what"),
        ({"tokens": "-batch"}, SCRIPT, "tokens: '-batch' gives -64 for tp=1, .*write what is more than 0"),
        ({"tokens": "recompute"}, SCRIPT, "tokens: 'recompute' gives '' for tp=1"),
    ],
)  # fmt: skip
def test_a_wrong_space_is_refused(change, script, words):
    def used() -> None:
        space = expand(declared({**SPACE, **change}), script, world=4, gpus=4)
        space.short_runs(space.recipes[0])

    with pytest.raises(ConfigError, match=words):
        used()


def test_a_space_without_a_recipe_names_the_conditions_without_which_most_points_would_be_one():
    words = ("train.py", "--global-batch-size", "500", "--seq-length", "4096", "--num-layers", "61")
    file = declared("megatron")
    with pytest.raises(ConfigError, match="none meets all conditions") as refused:
        expand(file, words, world=64, gpus=8)
    # Stages of 61 layers, or 500 sequences over 8 GPUs or more with their data: not the experts of a dense model.
    without = [
        (file.require[at], len(expand(structs.replace(file, require=file.require[:at] + file.require[at + 1 :]),
                                      words, 64, 8).recipes)) for at in (5, 6)
    ]  # fmt: skip
    for rule, count in without:
        assert f"{count} would without '{rule}'" in str(refused.value)
    assert "experts" not in refused.value.problem


def test_conditions_that_leave_no_recipe_only_together_are_named_together():
    file = declared({"values": {"tp": [1, 2, 4]}, "require": ["tp > 8", "world % tp == 0", "tp < 1"]})
    with pytest.raises(ConfigError, match="conditions: 2 would without 'tp > 8' and 'tp < 1'; widen"):
        expand(file, ("train.py", "{tp}"), world=2, gpus=2)


def test_a_condition_guards_those_behind_it():
    values = {"tp": [1, 4]}, {"dp": "world // tp"}
    file = declared({"values": values[0], "derived": values[1], "require": ["dp >= 1", "8 % dp == 0"]})
    space = expand(file, ("train.py", "{tp}"), world=2, gpus=2)
    assert [recipe.values["tp"] for recipe in space.recipes] == [1]
    assert space.excluded == {"dp >= 1": 1, "8 % dp == 0": 1}
    with pytest.raises(ConfigError, match="cannot be computed"):
        expand(structs.replace(file, require=file.require[::-1]), ("train.py", "{tp}"), world=2, gpus=2)


def test_a_recipe_is_found_by_the_values_that_tell_it_from_others():
    space = expand(declared(SPACE), SCRIPT, world=4, gpus=4)
    (found,) = space.find("tp=4, pp=1, recompute=none")
    assert found.values == {"tp": 4, "pp": 1, "recompute": ""}
    assert [one.values["recompute"] for one in space.find("tp=4,pp=1")] == ["", "--recompute full"]
    assert [one.values["tp"] for one in space.find("dp=2,pp=1,recompute=none")] == [2]
    assert space.find("batch=64") == space.recipes
    with pytest.raises(ConfigError, match="'tp=4,pp=2' is no recipe: it does not meet 'tp \\* pp <= world'"):
        space.find("tp=4,pp=2")
    with pytest.raises(ConfigError, match="'tp=2,dp=4' is no recipe: it does not meet 'dp == 4'"):
        space.find("tp=2,dp=4")
    with pytest.raises(ConfigError, match="'batch=32' is not what the command line or the cluster says: batch=64"):
        space.find("tp=2,batch=32")
    with pytest.raises(ConfigError, match="'tq' is unknown"):
        space.find("tq=4")
    with pytest.raises(ConfigError, match="'tp=4,tp=2' says tp twice"):
        space.find("tp=4,tp=2")


def test_a_recipe_is_found_by_what_a_value_is_and_not_how_it_is_written():
    space = expand(declared({"values": {"rate": [0.0001, 1.0], "names": ["tp,pp", "dp"], "on": [True, False]}}),
                   ("train.py", "{rate}", "{names}", "{on}"), 4, 4)  # fmt: skip
    assert [len(space.find(text)) for text in ("rate=1e-4", "rate=1", "on=True,rate=1.0", "names=dp")] == [4, 4, 2, 4]
    assert len(space.find({"names": "tp,pp", "rate": 1e-4, "on": False})) == 1
    assert all(recipe.number < len(space.recipes) for recipe in space.find("rate=1,on=true"))
    with pytest.raises(ConfigError, match="has a blank between two values; write a comma"):
        space.find("rate=1 names=dp")


def test_a_recipe_with_values_that_the_space_does_not_list_is_one_if_it_meets_the_conditions():
    space = expand(declared(SPACE), SCRIPT, world=6, gpus=6)
    found = space.find("tp=3,pp=2")
    assert [str(one) for one in found] == ["tp=3, pp=2, recompute=none", "tp=3, pp=2, recompute=--recompute full"]
    assert [one.number for one in found] == [len(space.recipes), len(space.recipes) + 1]
    assert found[0].argv == ("train.py", "--batch", "64", "--tp=3", "--pp", "2")
    (other,) = space.find("tp=1,pp=1,recompute=--recompute half")
    assert other.argv[-2:] == ("--recompute", "half")
    with pytest.raises(ConfigError, match="does not meet 'tp \\* pp <= world'"):
        space.find("tp=7")


def test_a_recipe_of_a_preset_may_leave_names_out_or_give_derived_ones():
    words = ("train.py", "--global-batch-size", "512", "--seq-length", "4096", "--num-layers", "32")
    space = expand(declared("megatron"), words, world=64, gpus=8)
    found = space.find("tp=8,pp=2")
    assert len(found) == 9
    assert space.find("tp=8,dp=4") == found
    (context,) = space.find("tp=4,pp=2,cp=2,micro_batch=1,recompute=none")
    assert str(context) == "tp=4, pp=2, micro_batch=1, recompute=none, cp=2"


def test_a_recipe_may_be_named_with_values_that_all_recipes_share():
    space = expand(declared(SPACE | {"require": ["tp * pp <= world", "pp == 1"]}), SCRIPT, world=4, gpus=4)
    assert space.varying == ("tp", "recompute")
    (found,) = space.find("tp=4,pp=1,recompute=none")
    assert str(found) == "tp=4, recompute=none"
    with pytest.raises(ConfigError, match="does not meet 'tp \\* pp <= world' and 'pp == 1'"):
        space.find("tp=4,pp=2,recompute=none")


def test_only_runs_with_more_micro_batches_than_the_fewest_come_later():
    file = declared(SPACE | {"batch": "batch", "short": {"tp": "1", "batch": "dp * pp"}})
    recipes = expand(file, SCRIPT, world=16, gpus=8)
    both = next(one for one in recipes.recipes if one.values["tp"] == 4 and one.values["pp"] == 2)
    assert [run.fewest for run in recipes.short_runs(both)] == [True, True, False, False]
    alone = next(one for one in recipes.recipes if one.values["tp"] == 2)  # too small for a smaller tp
    assert [run.fewest for run in recipes.short_runs(alone)] == [True, False]
    layers = expand(declared(SPACE | {"batch": None, "short": {"tp": "1"}}), SCRIPT, world=16, gpus=8)
    assert [run.fewest for run in layers.short_runs(layers.recipes[-1])] == [True, True]


def test_a_space_may_extend_a_preset():
    preset = declared("megatron")
    table = {"extends": "megatron", "values": {"cp": [1, 2]}, "require": ["cp <= tp"], "short_from": 8}
    mine = declared(table | {"arguments": ["--context-parallel-size={cp}"]})
    assert mine.values == preset.values | {"cp": [1, 2]}
    assert mine.arguments == ["--context-parallel-size={cp}", *preset.arguments]
    assert mine.require == [*preset.require, "cp <= tp"]
    assert (mine.short_from, mine.flags, mine.short) == (8, preset.flags, preset.short)
    with pytest.raises(ConfigError, match="extends: 'megatro' is unknown; did you mean 'megatron'"):
        declared({"extends": "megatro", "values": {}})


def test_spaces_on_the_page_read_and_vary_their_names():
    page = (ROOT / "docs" / "recipe-search.md").read_text(encoding="utf-8")
    tables = [tomllib.loads(text) for text in re.findall(r"```toml\n(.*?)```", page, re.DOTALL)]
    assert len(tables) == 3
    for table in tables:
        space = expand(declared(table), COMMANDS[table["extends"]], world=64, gpus=8)
        assert {name for name, value in table["values"].items() if isinstance(value, list)} <= {*space.varying}


COMMANDS = {
    "megatron": ["pretrain_gpt.py", "--global-batch-size", "512", "--seq-length", "4096", "--num-layers", "32"],
    "torchtitan": (
        ["torchtitan.train", "--training.num_tokens_per_train_step=4194304", "--training.max_context_length=8192"]
    ),
}


def test_megatrons_experts_are_divided_where_the_command_line_has_some():
    words = ("train.py", "--global-batch-size", "256", "--seq-length", "4096", "--num-layers", "32")
    dense = expand(declared("megatron"), words, world=64, gpus=8)
    assert "ep" not in dense.varying
    experts = expand(declared("megatron"), (*words, "--num-experts", "4"), world=64, gpus=8)
    assert {one.values["ep"] for one in experts.recipes} == {1, 2, 4}
    assert all(int(one.names["dp"]) % int(one.values["ep"]) == 0 for one in experts.recipes)
    (one,) = experts.find("tp=2,pp=1,ep=4,micro_batch=1,recompute=none")
    assert "--expert-model-parallel-size 4 --micro-batch-size 1 --sequence-parallel" in " ".join(one.argv)


def test_a_python_file_may_have_conditions_that_are_functions(tmp_path: Path):
    file = tmp_path / "space.py"
    file.write_text("SPACE = {'values': {'tp': [1, 2, 3]}, 'require': [lambda names: names['tp'] != 2]}")
    space = expand(declared(file), ("train.py", "{tp}"), world=4, gpus=4)
    assert [recipe.values["tp"] for recipe in space.recipes] == [1, 3]
    file.write_text("space = {}")
    with pytest.raises(ConfigError, match="defines no SPACE"):
        declared(file)


def test_expressions_know_arithmetic_and_conditions():
    assert evaluate("'a' if tp in (1, 2) and not pp > 1 else max(tp, 3)", {"tp": 2, "pp": 1}, "x") == "a"


@pytest.mark.parametrize("name", [path.stem for path in PRESETS.glob("*.toml")])
def test_presets_expand(name: str):
    file = declared(name)
    tokens = "--training.num_tokens_per_train_step=16777216"
    given = {"megatron": ["--global-batch-size", "256", "--seq-length", "4096", "--num-layers", "32"],
             "torchtitan": [tokens, "--training.max_context_length=8192"]}[name]  # fmt: skip
    space = expand(file, ("train.py", *given), world=64, gpus=8)
    assert len(space.recipes) > 30
    assert all(recipe.tokens for recipe in space.recipes)
    assert any(space.short_runs(recipe) for recipe in space.recipes)
    assert not any("{" in word for recipe in space.recipes for word in recipe.argv)


@pytest.mark.parametrize(
    ("name", "flag"),
    [
        ("tp", "tensor_parallel_degree"),
        ("pp", "pipeline_parallel_degree"),
        ("cp", "context_parallel_degree"),
        ("ep", "expert_parallel_degree"),
        ("replicate", "data_parallel_replicate_degree"),
    ],
)
def test_torchtitans_degrees_are_fixed_by_their_flags(name: str, flag: str) -> None:
    flags = ["--training.num_tokens_per_train_step=16777216", "--training.max_context_length=8192"]
    space = expand(declared("torchtitan"), ("train.py", *flags, f"--parallelism.{flag}=2"), world=64, gpus=8)
    assert name not in space.varying
    assert {recipe.names[name] for recipe in space.recipes} == {2}
    words = {word for recipe in space.recipes for word in recipe.argv if flag in word}
    assert words == {f"--parallelism.{flag}=2"}


def test_torchtitans_backend_is_one_that_pytorch_knows_unless_the_command_line_names_another():
    flags = ["--training.num_tokens_per_train_step=16777216", "--training.max_context_length=8192"]
    for given, backend in (([], "partial_dtensor"), (["--parallelism.spmd_backend=spmd_types"], "spmd_types")):
        space = expand(declared("torchtitan"), ("train.py", *flags, *given), world=64, gpus=8)
        chosen = {word for one in space.recipes for word in one.argv if "spmd_backend" in word}
        assert chosen == {f"--parallelism.spmd_backend={backend}"}


def test_values_may_be_any_sequence_and_conditions_are_checked():
    space = expand(declared({"values": {"tp": range(1, 3), "pp": (1, 2)}}), ("train.py", "{tp}", "{pp}"), 8, 8)
    assert len(space.recipes) == 4
    with pytest.raises(ConfigError, match="require"):
        declared({"values": {"tp": [1]}, "require": [3]})
    file = declared({"values": {"tp": [1, 2]}, "require": [lambda names: names["nothing"]]})
    with pytest.raises(ConfigError, match="fails: KeyError"):
        expand(file, ("train.py", "{tp}"), 8, 8)


def test_an_unknown_preset_names_those_that_there_are():
    with pytest.raises(ConfigError, match="did you mean 'megatron'"):
        declared("megatro")


@pytest.mark.parametrize(
    ("preset", "given", "flags"),
    [
        ("megatron", "--num-layers 32 --global-batch-size 512", "--seq-length"),
        ("megatron", "--num-layers 32 --seq-length 4096", "--global-batch-size"),
        ("megatron", "--seq-length 4096", "--global-batch-size, --num-layers"),
        ("torchtitan", "--training.num_tokens_per_train_step=4194304", "--training.max_context_length"),
    ],
)
def test_a_flag_that_a_space_reads_is_asked_for_where_it_is_missing(preset: str, given: str, flags: str) -> None:
    with pytest.raises(ConfigError, match=f"; give {flags} among its arguments"):
        expand(declared(preset), ["train.py", *given.split()], 64, 8)


@pytest.mark.parametrize(
    ("value", "flags"),
    [
        ("none", ()),
        ("selective", ("--recompute-activations",)),
        ("full", ["--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"]),
        ("--recompute-granularity selective", ("--recompute-granularity", "selective")),
    ],
)
def test_recomputation_of_megatron_has_short_names(value: str, flags: tuple[str, ...]) -> None:
    space = {"extends": "megatron", "values": {"recompute": value, "tp": 1, "pp": 1, "micro_batch": [1, 2]}}
    given = "pretrain_gpt.py --num-layers 8 --seq-length 4096 --global-batch-size 64"
    (first, _) = expand(declared(space), given.split(), 8, 8).recipes
    assert first.argv[first.argv.index("--micro-batch-size") + 2 :] == tuple(flags)
    assert str(first) == "micro_batch=1"
    every = expand(declared("megatron"), given.split(), 8, 8)
    assert {one.values["recompute"] for one in every.recipes} == {"none", "selective", "full"}
