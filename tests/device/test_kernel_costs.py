"""Costs of kernels by name: formulas and tables have the values that they say, and wrong files are told what is."""

from pathlib import Path

import pytest

from foretrain.device import Attention, Gemm, MemoryWork, OperatorModel, preset
from foretrain.device.calls import contiguous
from foretrain.device.kernel_costs import KernelArguments, KernelCosts, evaluate, load
from foretrain.errors import ConfigError
from foretrain.units import MICROSECOND, SECOND

X, W = contiguous((8, 1024, 64)), contiguous((64,), "float32")
GIVEN = KernelArguments(("x", "weight", "n", "scale"), (X, W, 7, None), moved=4096, results=(W,))


def costs(tmp_path: Path, text: str) -> KernelCosts:
    path = tmp_path / "costs.toml"
    path.write_text(text)
    return load(path)


@pytest.mark.parametrize(
    ("formula", "value"),
    [
        ("2 * bytes(x) + bytes(weight)", 2 * 2 * 8 * 1024 * 64 + 4 * 64),
        ("elements(0) // n", 8 * 1024 * 64 // 7),
        ("dim(x, -1) * dim(0, 1)", 64 * 1024),
        ("max(moved, 5) % 1000 + ceil(0.5) - -1", 96 + 1 + 1),
        ("log2(dim(x, 1)) ** 2", 100),
        ("bytes(result) / 2", 128),
        (12, 12),
    ],
)
def test_formula_has_its_value(formula: str, value: float) -> None:
    assert evaluate(formula, GIVEN, "moved") == value


@pytest.mark.parametrize(
    ("formula", "words"),
    [
        ("bytes(y)", "names 'y', which is no argument of the kernel; the kernel's arguments are x, weight, n, scale"),
        ("scale * 2", "names 'scale', which is no tensor and no number in this call"),
        ("bytes(n)", "takes 'n' for a tensor, which it is not"),
        ("x.shape", "has 'x.shape', which formulas do not know; formulas have + - *"),
        ("byte(x)", "has 'byte(x)', which formulas do not know; formulas have + - * / // % **, bytes(x)"),
        ("open('a')", "which formulas do not know"),
        ("dim(x)", "gives dim 1 arguments"),
        ("n / (n - n)", "has no value here"),
        ("dim(x, 5)", "has no value here"),
        ("n - 2 * n", "here; correct the formula: it must give a number from 0 on"),
        ("1e308 * 1e308", "is inf here"),
        ("(0 - 8) ** 0.5", "j) here"),
        ("x", "is a tensor, not a number"),
        ("2 *", "is no formula"),
    ],
)
def test_formula_that_cannot_be_computed_says_why(formula: str, words: str) -> None:
    with pytest.raises(ConfigError, match="moved: ") as caught:
        evaluate(formula, GIVEN, "moved")
    assert words in str(caught.value)


ENTRIES = """
[[kernel]]
name = "norm*"
time = "3us"

[[kernel]]
name = ["norm_backward", "mylib::scan"]
by = "elements(x)"
table = [[1000, "2us"], [100000, "20us"]]

[[kernel]]
name = "mine.product"
operator = "Gemm"
m = "dim(x, 1)"
n = 64
k = "dim(x, 2)"

[[kernel]]
name = "attend"
operator = "Attention"
batch = 8
heads = 1
kv_heads = 1
queries = "dim(x, 1)"
keys = "dim(x, 1)"
head_dim = "dim(x, 2)"
causal = false
backward = true
dtype = "fp16"

[[kernel]]
name = "mine.split"
results = [0, ["dim(0, 0)", 5]]
"""


def test_entries_give_times_tables_and_work_and_the_last_that_fits_counts(tmp_path: Path) -> None:
    found = costs(tmp_path, ENTRIES)

    def of(name: str, elements: int = 0):
        entry = found.find(name)
        assert entry is not None
        return entry.of(KernelArguments(("x",), (contiguous((elements,)),), 0) if elements else GIVEN)

    assert of("norm_forward") == 3 * MICROSECOND
    assert [of("norm_backward", size) for size in (10, 1000, 100000, 200000)] == [
        MICROSECOND * time for time in (2, 2, 20, 40)
    ]
    middle = of("mylib::scan", 10000)
    assert middle == pytest.approx(MICROSECOND * 40**0.5, abs=2)
    assert found.unused == ["mine.product", "attend", "mine.split"]
    assert of("mine.product") == Gemm(1024, 64, 64, dtype="bf16")
    assert of("attend") == Attention(8, 1, 1, 1024, 1024, 64, causal=False, dtype="fp16", backward=True)
    assert of("mine.split") is None
    split = found.find("mine.split")
    assert split is not None
    assert split.results == (0, ("dim(0, 0)", "5"))
    assert found.find("unheard_of") is None
    assert not found.unused
    assert of("liger_kernel.ops.rope._triton_rope") == MemoryWork(4096)  # as the package knows


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "kernel is missing; begin each entry with a line [[kernel]]"),
        ("kernel = 1", "kernel: 1 is no list of tables; begin each with a line [[kernel]]"),
        ("[[kernels]]", "field: 'kernels' is unknown; did you mean 'kernel'?"),
        ("[[kernel]\n", "is not TOML"),
        ('[[kernel]]\ntime = "1us"', "kernel[0].name: None is not the name of a kernel"),
        ('[[kernel]]\nname = "a"', "kernel[0].name: 'a' has no cost; write a time, a table or an operator"),
        ('[[kernel]]\nname = "a"\nopertor = "Gemm"', "kernel[0].field: 'opertor' is unknown; did you mean 'operator'?"),
        ('[[kernel]]\nname = "a"\nmoved = 5', "kernel[0].name: 'a' has no cost; write a time, a table or an operator"),
        ('[[kernel]]\nname = "a"\ntime = 5', "kernel[0].time: 5 "),
        ('[[kernel]]\nname = "a"\ntime = "1us"\ncolour = 1', "kernel[0].field: 'colour' is unknown"),
        ('[[kernel]]\nname = "a"\ntime = "1us"\noperator = "Gemm"', "operator: 'Gemm' stands beside time"),
        ('[[kernel]]\nname = "a"\noperator = "Gem"', "operator: 'Gem' is unknown; did you mean 'Gemm'?"),
        ('[[kernel]]\nname = "a"\noperator = "Gemm"\nm = 1\nn = 1', "k is missing; write the k of the Gemm"),
        ('[[kernel]]\nname = "a"\noperator = "Memory"\nmoved = "2 *"', "moved: '2 *' is no formula"),
        ('[[kernel]]\nname = "a"\noperator = "Memory"\nmoved = "size(x)"', "kernel[0].moved: 'size(x)' has 'size(x)'"),
        ('[[kernel]]\nname = "a"\noperator = "Memory"\nmoved = 1\ndtype = 2', "field: 'dtype' is unknown"),
        ('[[kernel]]\nname = "a"\nby = "1"\ntime = "1us"', "by: '1' stands without a table"),
        (
            '[[kernel]]\nname = "a"\nby = "n"\ntable = [[2, "1us"], [1, "2us"]]',
            "table[1]: [1, '2us'] is no larger size",
        ),
        ('[[kernel]]\nname = "a"\ntable = [[2, "1us"]]', "by: None is no formula"),
        ('[[kernel]]\nname = "a"\nresults = [-1]', "results[0]: -1 is neither a position nor a shape"),
    ],
)
def test_wrong_file_is_told_field_value_and_remedy(text: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        costs(tmp_path, text)
    assert words in str(caught.value)
    assert "costs.toml" in str(caught.value)


def test_formula_that_a_kernel_does_not_fit_is_told_with_its_entry(tmp_path: Path) -> None:
    entry = costs(tmp_path, '[[kernel]]\nname = "scale"\noperator = "Memory"\nmoved = "bytes(y)"').find("scale")
    assert entry is not None
    with pytest.raises(ConfigError, match=r"kernel\['scale'\].moved: 'bytes\(y\)' names 'y', which is no argument"):
        entry.of(GIVEN)


def test_missing_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"costs: .*cannot be read"):
        load(tmp_path / "none.toml")


@pytest.mark.parametrize(("heads", "measured"), [(64, 3.133e-3), (128, 5.092e-3)])  # Nemotron 3 Nano, Super
def test_scan_of_mamba_on_gb200_is_within_a_tenth_of_what_was_measured(heads: int, measured: float) -> None:
    names = ("input0", "chunk", "heads", "width", "groups", "state")
    x = contiguous((8, 8192, heads, 64))
    cost = KernelCosts().find("mamba_ssm::chunk_scan")
    assert cost
    work = cost.of(KernelArguments(names, (x, 128, heads, 64, 8, 128), moved=0))
    assert isinstance(work, MemoryWork)

    assert OperatorModel(preset("GB200")).estimate(work).time / SECOND == pytest.approx(measured, rel=0.1)
    assert OperatorModel(preset("A100")).estimate(work).time / SECOND > measured  # its memory is slower than the scan
