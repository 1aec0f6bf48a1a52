from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from foretrain.errors import ConfigError
from foretrain.workload import Gradient, Layer, Workload, load, save

times = st.integers(0, 10**15)


@st.composite
def workloads(draw):
    names = st.text(max_size=8)
    layers = draw(
        st.lists(st.builds(Layer, names, times, times.map(lambda time: time + 1), times), min_size=1, max_size=6)
    )
    backward = sum(layer.backward for layer in layers)
    gradients = [
        Gradient(
            name,
            draw(st.integers(1, 2**40)),
            draw(st.integers(0, len(layers) - 1)),
            draw(st.integers(0, backward)),
        )
        for name in draw(st.lists(names, min_size=1, max_size=8, unique=True))
    ]
    batch = draw(st.integers(1, 2**70))
    return Workload(draw(names), batch, tuple(layers), tuple(gradients), draw(names), draw(st.text(max_size=40)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("workloads")


ODD = 'ΔΣ 层 🐍 a"b\\c line\nbreak\r\n\ttab \x00\x1f\x7f\x85\u2028\ufeff'


@settings(max_examples=150, deadline=None)
@given(workload=workloads())
@example(Workload(ODD, 1, (Layer(ODD, 1, 2, 3),), (Gradient(ODD, 4, 0, 2),), ODD, ODD))
def test_load_gives_back_exactly_what_was_saved(folder, workload):
    save(workload, folder / "any.toml")
    assert load(folder / "any.toml") == workload


def test_half_a_surrogate_pair_cannot_be_saved(folder):
    workload = Workload("\ud800", 1, (Layer("a", 1, 2),), (Gradient("a", 4, 0, 2),))
    with pytest.raises(ConfigError, match="is not valid Unicode"):
        save(workload, folder / "surrogate.toml")
    assert not (folder / "surrogate.toml").exists()


GOOD = """\
name = "tiny"
batch = 32
unit = "images"

layers = [
  { name = "conv", forward = "1.5ms", backward = "3 ms", update = "7us" },
  { name = "fc", forward = "200us", backward = "400us" },
]
gradients = [
  { name = "conv.weight", size = "6912B", layer = "conv", release = "3.4ms" },
  { name = "fc.weight", size = "4MB", layer = 1, release = "400us" },
]
"""
NONE = 'name="a"\nbatch=1\nlayers={}\ngradients=[]'


def test_a_person_can_write_one_and_read_what_was_saved(tmp_path):
    path = tmp_path / "tiny.toml"
    path.write_text(GOOD)
    loaded = load(path)
    assert loaded == Workload(
        "tiny",
        32,
        (Layer("conv", 1_500_000_000, 3_000_000_000, 7_000_000), Layer("fc", 200_000_000, 400_000_000)),
        (Gradient("conv.weight", 6912, 0, 3_400_000_000), Gradient("fc.weight", 4_000_000, 1, 400_000_000)),
        "images",
    )
    save(loaded, path)
    assert path.read_text().splitlines() == [
        'name = "tiny"',
        "batch = 32",
        'unit = "images"',
        'source = ""',
        "",
        "# In forward order.",
        "layers = [",
        '  { name = "conv", forward = "1.5ms", backward = "3ms", update = "7us" },',
        '  { name = "fc", forward = "200us", backward = "400us", update = "0ps" },',
        "]",
        "",
        "# In registration order; release counts from the start of the backward pass.",
        "gradients = [",
        '  { name = "conv.weight", size = "6912B", layer = "conv", release = "3.4ms" },',
        '  { name = "fc.weight", size = "4MB", layer = "fc", release = "400us" },',
        "]",
    ]


def test_layers_that_share_a_name_are_referred_to_by_number(tmp_path):
    layers = (Layer("relu", 1, 1), Layer("relu", 1, 1))
    workload = Workload("twins", 1, layers, (Gradient("w", 4, 1, 1),))
    path = tmp_path / "twins.toml"
    save(workload, path)
    assert "layer = 1," in path.read_text()
    assert load(path) == workload
    path.write_text(path.read_text().replace("layer = 1,", 'layer = "relu",'))
    with pytest.raises(ConfigError, match=r"gradients\[0\].layer: 'relu' is the name of 2 layers; .*one of 0, 1"):
        load(path)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"1.5ms"', '"12"', "layers[0].forward: '12' is not a time; write e.g. '2us'"),
        ('"1.5ms"', "12", "layers[0].forward: 12 is not a time; write e.g. '2us'"),
        ('backward = "400us"', 'backwrd = "4us"', "layers[1].backwrd: 'backwrd' is unknown; did you mean 'backward'"),
        (', backward = "400us"', "", "layers[1].backward is missing; write backward = '4us'"),
        ('name = "fc"', "name = 3", "layers[1].name: 3 is not text; write it in quotes"),
        ('"6912B"', '"6912"', "gradients[0].size: '6912' is not a size; write e.g. '25MB'"),
        ('"6912B"', '"0B"', "gradients[0].size: 0 is not a whole number of at least 1"),
        ('layer = "conv"', 'layer = "convv"', "gradients[0].layer: 'convv' is unknown; did you mean 'conv'"),
        ('layer = "conv"', "layer = true", "gradients[0].layer: True is not a whole number"),
        ("layer = 1", "layer = 2", "gradients[1].layer: 2 is no layer; layers are numbered 0 to 1"),
        ("layer = 1, ", "", "gradients[1].layer is missing; write layer = 'conv1'"),
        ('"fc.weight"', '"conv.weight"', "gradients[1].name: 'conv.weight' appears twice; names are unique"),
        ('"3.4ms"', '"4s"', "gradients[0].release: '4s' is after the backward pass; the backward pass ends at 3.4ms"),
        ("batch = 32", "batch = -32", "batch: -32 is not a positive number of samples"),
        ("batch = 32", "", "batch is missing; write batch = 64"),
        ("batch = 32", "btch = 32", "btch: 'btch' is unknown; did you mean 'batch'"),
        ('name = "tiny"', "", "name is missing"),
        ("layers = [", "layers = [ 5,", "layers[0]: 5 is not a table"),
        ("batch = 32", "batch = = 32", "line 2: 'batch = = 32' is not TOML (Invalid value); correct that line"),
        ("batch = 32", "batch = 3\nbatch = 4", "line 3: 'batch = 4' is not TOML (Cannot overwrite a value)"),
        ("\n]\n", "\n", "is not TOML"),
        (GOOD, "", "layers is missing"),
        (GOOD, NONE.format("3"), "layers: 3 is not a list; write layers = [ { name = … }, … ]"),
        (GOOD, NONE.format("[]"), "layers: [] is empty; a step has at least one layer"),
        (GOOD, "name = [1,", "line 1: 'name = [1,' is not TOML"),
    ],
)
def test_a_mistake_is_named_with_its_place_and_its_remedy(tmp_path, monkeypatch, old, new, message):
    assert old in GOOD
    monkeypatch.chdir(tmp_path)
    Path("tiny.toml").write_text(GOOD.replace(old, new, 1))
    with pytest.raises(ConfigError) as caught:
        load("tiny.toml")
    assert str(caught.value).startswith("tiny.toml: ")
    assert message in str(caught.value)


def test_what_cannot_be_read_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"none.toml: .* cannot be read \(No such file or directory\); give the path"):
        load(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match=r"cannot be read \(Is a directory\)"):
        load(tmp_path)
    (tmp_path / "latin.toml").write_bytes(b'batch = 1\nname = "\xe9"')
    with pytest.raises(ConfigError, match=r"latin\.toml: line 2: 233 is no UTF-8; save the file as UTF-8"):
        load(tmp_path / "latin.toml")
