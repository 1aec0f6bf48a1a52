"""Every published row is a command that its script takes, with sizes that divide, or is left out for a reason."""

import csv
import sys
from collections import Counter, defaultdict
from itertools import combinations

import pytest

from foretrain.network.deployment_notation import deployment
from tests.examples.torchrun import ROOT

ACCURACY = ROOT / "benchmarks" / "accuracy"


@pytest.fixture
def accuracy(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(ACCURACY), *sys.path])


@pytest.fixture
def read(accuracy):
    from rows import read

    return read()


def parsed(monkeypatch, options, row):
    monkeypatch.setattr(sys, "argv", [row.script, *row.argv])
    return options()


def test_all_rows_are_there(read):
    rows, left = read

    with (ACCURACY / "groundtruth-train.csv").open(encoding="utf-8") as file:
        assert len(rows) + len(left) == sum(1 for _ in file) - 1
    counts = Counter(row.family for row in rows)
    assert counts["torchtitan"] == 25
    assert counts["llmfoundry"] == 123
    assert counts["fmsfsdp"] == 4
    assert counts["vtrain-multi"] == 53
    assert counts["vtrain-single"] == 797
    assert counts["korthikanti22"] == 4
    assert all(one.reason for one in left)


def test_a_row_is_what_was_published(read):
    row = next(row for row in read[0] if row.id == "torchtitan-0001")

    assert (row.cluster, row.gpu, row.ranks) == ("dgx-h100:1", "h100-96gb-hbm2e-500w", 8)
    assert " ".join(row.argv) == "--model llama3-8b --sequence 8192 --batch 2 --recompute selective"
    assert row.rate == pytest.approx(5762, rel=1e-3)
    assert row.memory == round(82.4 * 2**30)
    assert not row.departures


def test_published_rates_are_those_of_the_tokens_counted(read):
    """Two columns agree, tokens per second and GPU, and seconds a step: the step has the sizes that we think."""
    with (ACCURACY / "groundtruth-train.csv").open(encoding="utf-8", newline="") as file:
        published = {row["id"]: row["tokens_per_s_per_gpu"] for row in csv.DictReader(file)}
    apart = [row.id for row in read[0] if published[row.id] and abs(row.rate / float(published[row.id]) - 1) > 0.01]

    assert apart == []


def test_vtrains_times_on_one_server_are_sums():
    """More data-parallel ranks add the same to all micro-batches, to 20 us of up to 2 s: nobody measured that."""
    times, gaps = defaultdict(dict), defaultdict(list)
    with (ACCURACY / "groundtruth-train.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if row["family"] == "vtrain-single" and row["pp"] == "1":
                rounds = int(row["global_batch"]) // int(row["dp"])
                times[row["model"], row["tp"], row["micro_batch"], rounds][row["dp"]] = float(row["iter_time_s"])
    for (model, tensor, _, _), found in times.items():
        for few, many in combinations(sorted(found), 2):
            gaps[model, tensor, few, many].append(found[many] - found[few])
    several = [gap for gap in gaps.values() if len(gap) > 1]

    assert len(several) > 20
    assert all(max(gap) - min(gap) < 2e-5 for gap in several)


def test_clusters_hold_the_ranks(read):
    for cluster, ranks in {(row.cluster, row.ranks) for row in read[0] if row.ranks <= 64}:
        assert deployment(cluster, alone=True).total_gpus >= ranks, cluster
    for row in read[0]:
        servers = int(row.cluster.partition(",")[0].partition("@")[0].partition(":")[2])
        most = (72 if servers == 1 else 64) if "nvl72" in row.cluster else 8
        assert most * (servers - 1) < row.ranks <= most * servers, row.id


def test_sizes_divide_in_megatron(read, monkeypatch):
    import megatron

    for row in (row for row in read[0] if row.script == "megatron.py"):
        args = parsed(monkeypatch, megatron.options, row)
        shape = megatron.shape_of(args)
        replicas, rest = divmod(row.ranks, args.tp * args.cp * args.pp)
        assert not rest, row.id
        micro_batches, rest = divmod(args.global_batch, replicas * args.micro_batch)
        assert micro_batches, row.id
        assert not rest, row.id
        assert args.vp == 1 or micro_batches % args.pp == 0, row.id
        stages = [megatron.layers_of(shape, args, number) for number in range(args.pp * args.vp)]
        assert [layer for stage in stages for layer in stage] == list(range(shape.layers)), row.id
        assert shape.heads % args.tp == shape.groups % args.tp == shape.words % args.tp == 0, row.id
        assert args.sequence % (2 * args.cp * args.tp) == 0, row.id
        if shape.mixture:
            assert replicas * args.cp * args.tp % (args.ep * args.etp) == shape.mixture.experts % args.ep == 0, row.id
            assert shape.mixture.feed % args.etp == 0, row.id
        assert row.tokens == args.global_batch * args.sequence, row.id


def test_sizes_divide_in_the_others(read, monkeypatch):
    import llama
    import mpt

    for row in read[0]:
        if row.script == "llama.py":
            args = parsed(monkeypatch, llama.options, row)
            replicas, rest = divmod(row.ranks, args.tp * args.cp * args.pp)
            assert not rest, row.id
            assert row.tokens == replicas * args.batch * args.sequence, row.id
            assert args.batch % (args.microbatches or args.pp) == 0, row.id
        elif row.script == "mpt.py":
            args = parsed(monkeypatch, mpt.options, row)
            assert args.global_batch % (row.ranks * args.micro_batch) == 0, row.id


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("gpt3-175b", 175e9),
        ("megatron-22b", 22e9),
        ("mt-nlg-530b", 530e9),
        ("llama3-8b", 8.03e9),
        ("llama3-70b", 70.6e9),
        ("llama3-405b", 405.9e9),
        ("nemotron4-15b", 15.6e9),
        ("nemotron4-340b", 341e9),
        ("grok1", 314e9),
        ("qwen3-30b-a3b", 30.5e9),
        ("qwen3-235b-a22b", 235e9),
        ("gpt-oss-120b", 116.8e9),
        ("deepseek-v2", 236e9),
        ("deepseek-v3", 671e9),
    ],
)
def test_megatron_models_have_as_many_parameters_as_published(accuracy, name, parameters):
    from megatron_model import SHAPES, blocks

    shape = SHAPES[name]
    attention = 2 * shape.hidden * (shape.heads + shape.groups) * shape.head
    if one := shape.latent:
        queries, others = one.queries * (shape.head + one.turned), (2 * one.values + shape.hidden) * shape.head
        attention = shape.hidden * (one.queries + one.values + one.turned) + shape.heads * (queries + others)
    feeds = [shape.feed] * shape.layers
    if mixture := shape.mixture:
        each = mixture.experts * mixture.feed + mixture.shared
        feeds = [shape.feed] * mixture.dense + [each] * (shape.layers - mixture.dense)
    feed = (1 + blocks(shape)) * shape.hidden * sum(feeds)
    words = shape.words * shape.hidden * (1 if shape.tied else 2)

    assert shape.layers * attention + feed + words == pytest.approx(parameters, rel=0.02)


def test_contributed_runs_are_rows(accuracy, tmp_path):
    from rows import contributed

    table, common = (
        tmp_path / "table.toml",
        'step_time = "2 s"\nsource = "log"\nsoftware = "torch"\ndate = 2025-11-25\n',
    )
    ours = 'command = "benchmarks/accuracy/llama.py --batch 2"\ncluster = "dgx-h100:2,device=H100"\nmemory = "70 GiB"\n'
    on_one = 'command = "benchmarks/accuracy/llama.py --batch 2"\ncluster = "A100"\n'
    theirs = [
        f'command = "{command}"\ncluster = "dgx-h100:1,device=H100"\n'
        for command in ("train.py", "-m train.all --batch 2", "X=1 benchmarks/accuracy/llama.py")
    ]
    table.write_text("".join(f'[[run]]\ncontributor = "Ada"\n{common}{one}' for one in (ours, on_one, *theirs)))
    (row, single), left = contributed(table)

    assert (row.cluster, row.device, row.ranks, row.seconds) == ("dgx-h100:2,device=H100", "H100", 16, 2)
    assert (ACCURACY / row.script).resolve() == ACCURACY / "llama.py"
    assert (row.argv, row.memory, row.contributor) == (("--batch", "2"), 70 << 30, "Ada")
    assert (single.cluster, single.device, single.ranks) == ("A100", "A100", 1)
    assert [one.reason for one in left] == [
        "train.py is not in this checkout",
        "train.all is not in this checkout",
        "benchmarks/accuracy/llama.py needs variables of the environment",
    ]
