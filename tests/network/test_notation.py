import contextlib
import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrain import device
from foretrain.errors import ConfigError
from foretrain.network import Cluster, cluster, load, preset
from foretrain.network.notation import PRESETS
from foretrain.units import MICROSECOND

V100_LOCAL = device.preset("V100").local_rate


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4x8xV100@100Gbps", Cluster(4, 8, "V100", 12.5e9, 12.5e9, local=V100_LOCAL)),
        ("4 × 8 × V100 @ 100 Gbps", Cluster(4, 8, "V100", 12.5e9, 12.5e9, local=V100_LOCAL)),
        ("4 workers @ 1Gbps", Cluster(4, up=1.25e8, down=1.25e8)),
        ("4@1GB/s", Cluster(4, up=1e9, down=1e9)),
        ("4@1GB/s/2GB/s", Cluster(4, up=1e9, down=2e9)),
        ("4x2@1Gbps,local=8GB/s", Cluster(4, 2, up=1.25e8, down=1.25e8, local=8e9)),
        (
            "4x1xV100@10Gbps/1Gbps,ps=2,latency=5us",
            Cluster(4, 1, "V100", 1.25e9, 1.25e8, latency=5 * MICROSECOND, exchange="ps", servers=2),
        ),
        ("4@10Gbps,ps", Cluster(4, exchange="ps", servers=4)),
        ("4@10Gbps, ps=colocated", Cluster(4, exchange="ps_colocated")),
        ("4@10Gbps,all_reduce,overhead=0s", Cluster(4, overhead=0)),
        ("4@10Gbps,ps=1,server=40Gbps", Cluster(4, exchange="ps", servers=1, server_rate=5e9)),
        ("1@10Gbps,ps=1", Cluster(1, exchange="ps", servers=1)),
        ("dgx-h100:16", Cluster(16, 8, "H100", 400e9, 400e9, local=device.preset("H100").local_rate)),
        ("DGX-V100:2,rate=10Gbps,ps", Cluster(2, 8, "V100", exchange="ps", servers=2, local=V100_LOCAL)),
    ],
)
def test_notation(text, expected):
    assert cluster(text) == expected


@pytest.mark.parametrize("name", PRESETS)
def test_presets(name):
    place = cluster(f"{name}:4")
    assert cluster(place) is place
    assert place == preset(name, 4) == preset(name.upper(), 4)
    assert (place.workers, place.gpus) == (4, 8)
    assert preset(name, 4, latency="1us", up="1Gbps").up == 1.25e8


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("4x1xV100@10Gbps,ps=2,all_reduce", "exchange: 'all_reduce' contradicts an option before it"),
        ("4@10Gbps,latency=1us,latency=1us", "latency: 'latency=1us' contradicts an option before it"),
        ("4@10Gbps,rate=1Gbps", "rate: '1Gbps' contradicts the rate after '@'"),
        ("4@10Gbps,all_reduce=2", "all_reduce: '2' is no setting of a ring"),
        ("1@10Gbps", "workers: 1 with 1 GPU has nobody to exchange gradients with"),
        ("4@0Gbps", "up: '0Gbps' is not a rate above 0"),
        ("4@10Gb", "up: '10Gb' is not a rate; write e.g. '100Gbps'"),
        ("4@10", "is not a cluster; write e.g. '4x8xV100@100Gbps'"),
        ("4@10Gbps,latency=5", "latency: '5' is not a time"),
        ("4@10Gbps,ps=-1", "ps: '-1' is not a number of servers"),
        ("4@10Gbps,ps=²", "ps: '²' is not a number of servers"),
        ("4@10Gbps,latncy=5us", "option: 'latncy' is unknown; did you mean 'latency'?"),
        ("4@10Gbps,", "option: '' is unknown"),
        ("4x1xV10@10Gbps", "device: 'V10' is unknown; did you mean 'V100'"),
        ("4x8x100@10Gbps", "device: '100' is unknown"),
        ("dgx-h10:4", "topology 'dgx-h10:4'.kind: 'dgx-h10' is unknown; did you mean 'dgx-h100'"),
        ("dgx-h100", "does not say how many servers"),
        ("dgx-h100:²", "does not say how many servers"),
        ("dgx-h100:" + "9" * 5000, "does not say how many servers"),
        ("4:5", "does not say how fast a link is"),
        ("4", "does not say how fast a link is"),
        ("9" * 5000 + "@1Gbps", "is not a cluster"),
        ("", "is unknown"),
        ("\0.toml", "null byte"),
    ],
)
def test_what_is_wrong_is_named(text, words):
    with pytest.raises(ConfigError) as caught:
        cluster(text)
    assert words in str(caught.value)


@pytest.mark.parametrize("wrong", [None, 4, b"4@1Gbps"])
def test_only_text_is_a_text(wrong):
    with pytest.raises(ConfigError, match="is not a text"):
        cluster(wrong)


NUMBERS = ["4", "0", "8", "-1", "2", "²", "nan", ".", "e9", "10Gbps", "1GB/s"]
SIGNS = ["x", "×", "@", "/", ",", "=", ":", " "]
NAMES = ["V100", "workers", "dgx-h100", "ps", "colocated", "all_reduce"]
OPTIONS = ["latency=5us", "rate", "server=1Gbps", "local="]
FRAGMENTS = st.sampled_from([*NUMBERS, *SIGNS, *NAMES, *OPTIONS])


@given(st.one_of(st.text(), st.lists(FRAGMENTS, max_size=12).map("".join)))
def test_any_text_is_a_cluster_or_a_config_error(text):
    with contextlib.suppress(ConfigError):
        assert cluster(text).cost.per_byte > 0


def test_a_file_says_the_same(tmp_path):
    path = tmp_path / "cluster.toml"
    path.write_text(
        'workers = 4\nrate = "10Gbps"\nlatency = "5us"\noverhead = "0s"\n'
        'exchange = "ps"\nservers = 2\nserver_rate = "40Gbps"\n'
    )
    assert load(path) == cluster(str(path)) == cluster("4@10Gbps,latency=5us,overhead=0s,ps=2,server=40Gbps")
    for lines in ('rate = "10Gbps"\ndown = "1Gbps"', 'down = "1Gbps"\nrate = "10Gbps"'):
        path.write_text(f"workers = 4\n{lines}\n")
        assert load(path) == cluster("4@10Gbps/1Gbps")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "workers is missing"),
        ("workers = 4\ndown = '1Gbps'", "rate is missing"),
        ('workers = 4\nrte = "1Gbps"', "key: 'rte' is unknown; did you mean 'rate'"),
        ("workers = 4\nrate = 5", "rate: 5 is not a rate"),
        ('workers = "4"\nrate = "1Gbps"', "workers: '4' is not a whole number"),
        ("workers = 4\ngpus = [8]\nrate = '1Gbps'", "gpus: [8] is not a whole number"),
        ("workers = 4\ndevice = 5\nrate = '1Gbps'", "device: 5 is unknown"),
        ("workers = 4\n[links]\nrate = 1", "key: 'links' is unknown"),
        ("workers =", "does not parse"),
        ("a = " + "[" * 100_000, "does not parse"),
    ],
)
def test_a_wrong_file_is_named_with_its_key(tmp_path, text, words):
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        cluster(str(path))
    assert str(caught.value).startswith(str(path))
    assert words in str(caught.value)


def test_a_file_that_is_no_text_or_not_there(tmp_path):
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="does not parse"):
        load(tmp_path / "bytes.toml")
    with pytest.raises(ConfigError, match="cannot be read"):
        load(tmp_path / "nowhere.toml")
    with pytest.raises(ConfigError, match="cannot be read"):
        load(tmp_path)


KEYS = [*sorted({field.name for field in dataclasses.fields(Cluster)} - {"workers", "servers"}), "rate", "other"]
VALUES = st.one_of(
    st.integers(-1, 9), st.sampled_from(["ps", "V100", "1Gbps", "2us", "", "²"]), st.booleans(), st.none()
)


@given(st.dictionaries(st.sampled_from(KEYS), VALUES))
def test_any_changes_to_a_preset_give_a_cluster_or_a_config_error(changes):
    with contextlib.suppress(ConfigError):
        assert preset("dgx-v100", 4, **changes).workers == 4


def test_a_preset_may_have_parameter_servers_besides():
    place = preset("dgx-h100", servers=16, parameter_servers=4, rate="25Gbps")
    assert (place.workers, place.gpus, place.exchange, place.servers) == (16, 8, "ps", 4)
    assert preset("p3.16xlarge", 2, exchange="ps_colocated").exchange == "ps_colocated"
