import math
from itertools import accumulate

import pytest

from foretrain import device, workload
from foretrain.errors import ConfigError
from foretrain.units import SECOND
from foretrain.workload import Workload, zoo, zoo_models
from foretrain.workload.models.convnets import inception_v3
from foretrain.workload.models.net import Net

# torchvision's and Hugging Face's counts; Transformer-big is derived (the paper's Table 3 says 213 million).
PARAMETERS = {
    "alexnet": 61_100_840,
    "vgg16": 138_357_544,
    "vgg19": 143_667_240,
    "resnet50": 25_557_032,
    "resnet101": 44_549_160,
    "resnet152": 60_192_808,
    "inception_v3": 23_834_568,
    "bert_base": 109_482_240,
    "bert_large": 335_141_888,
    "gpt2": 124_439_808,
    "transformer_big": 214_245_376,
    "llama3_8b": 8_030_261_248,
}

# Multiply-accumulates of one image's forward pass as torchvision's model cards give them.
GIGA_MACS = {
    "alexnet": 0.71,
    "vgg16": 15.47,
    "vgg19": 19.63,
    "resnet50": 4.09,
    "resnet101": 7.80,
    "resnet152": 11.51,
    "inception_v3": 5.71,
}


@pytest.fixture(scope="module")
def models() -> dict[str, Workload]:
    return {name: zoo(name) for name in zoo_models()}


def test_the_zoo_holds_the_documented_models_with_the_published_parameters(models):
    width = {"llama3_8b": 2}
    assert {name: work.size // width.get(name, 4) for name, work in models.items()} == PARAMETERS
    assert inception_v3(aux=True).elements == 27_161_264


@pytest.mark.parametrize("name", GIGA_MACS)
def test_arithmetic_is_the_published_one(name):
    from foretrain.workload.models import _MODELS

    assert _MODELS[name].build().macs / 1e9 == pytest.approx(GIGA_MACS[name], rel=0.01)


def test_a_transformers_arithmetic_is_two_flops_per_weight_and_token():
    from foretrain.workload.models.transformers import bert_large

    net, tokens = bert_large(128), 128
    matrices = sum(p.elements for p in net.parameters if len(p.shape) == 2 and "embeddings" not in p.name)
    pooler = 1024 * 1024 * (tokens - 1)  # it sees one token only
    attention = 24 * 2 * tokens**2 * 1024
    assert net.macs == matrices * tokens - pooler + attention


@pytest.mark.parametrize("name", PARAMETERS)
def test_tensors_are_released_when_their_layers_backward_ends_and_every_layer_takes_time(models, name):
    w = models[name]
    ends = list(accumulate(layer.backward for layer in reversed(w.layers)))[::-1]
    assert [gradient.release for gradient in w.gradients] == [ends[gradient.layer] for gradient in w.gradients]
    owners = {gradient.layer for gradient in w.gradients}
    assert all(layer.forward > 0 and layer.backward > 0 for layer in w.layers)
    assert {index for index, layer in enumerate(w.layers) if layer.update} == owners
    assert len({layer.name for layer in w.layers}) == len(w.layers)
    assert w.backward / w.forward == pytest.approx(2, rel=0.15)


def test_names_and_order_are_pytorchs_and_the_first_layer_needs_no_gradient_of_its_input(models):
    first = models["resnet50"].layers[0]
    assert (first.name, first.backward) == ("conv1", first.forward)
    names = [gradient.name for gradient in models["resnet50"].gradients]
    assert names[:6] == ["conv1.weight", "bn1.weight", "bn1.bias", "layer1.0.conv1.weight", *_norm("layer1.0.bn1")]
    assert names[12:15] == ["layer1.0.downsample.0.weight", *_norm("layer1.0.downsample.1")]
    assert names[-2:] == ["fc.weight", "fc.bias"]
    assert [gradient.name for gradient in models["alexnet"].gradients][-4:-2] == [
        "classifier.4.weight",
        "classifier.4.bias",
    ]


def _norm(name):
    return [f"{name}.weight", f"{name}.bias"]


def test_registration_order_may_differ_from_execution_order():
    w = zoo("llama3_8b")
    block = [g for g in w.gradients if g.name.startswith("model.layers.0.")]
    assert [g.name.removeprefix("model.layers.0.") for g in block][-2:] == [
        "input_layernorm.weight",
        "post_attention_layernorm.weight",
    ]
    assert [layer.name for layer in w.layers[1:4]] == [
        "model.layers.0.input_layernorm",
        "model.layers.0.self_attn.q_proj",
        "model.layers.0.self_attn.k_proj",
    ]
    norm = next(g for g in block if "input" in g.name)
    assert norm.layer < min(g.layer for g in block if g is not norm)
    fairseq = [g.name for g in zoo("transformer_big").gradients][1:7:2]
    assert fairseq == [f"encoder.layers.0.self_attn.{which}_proj.weight" for which in "kvq"]


@pytest.mark.parametrize(
    ("name", "tensor", "output"),
    [
        ("gpt2", "transformer.wte.weight", "lm_head"),
        ("transformer_big", "encoder.embed_tokens.weight", "decoder.output_projection"),
    ],
)
def test_a_tied_matrix_is_one_gradient_of_its_first_use(models, name, tensor, output):
    w = models[name]
    tied = w.gradients[0]
    assert (tied.name, tied.layer, tied.release) == (tensor, 0, w.backward)
    last = w.layers[-1]
    assert last.name == output
    assert last.update == 0
    assert all(gradient.layer != len(w.layers) - 1 for gradient in w.gradients)


@pytest.mark.parametrize("spelling", ["ResNet-50", "RESNET50", "resnet_50", "resnet-50", " resnet50 "])
def test_names_ignore_case_and_hyphens_and_a_device_may_be_data(spelling, models):
    assert zoo(spelling) == zoo("resnet50", device=device.preset("v100")) == models["resnet50"]


def test_precision_sets_the_size_of_gradients():
    full, half = zoo("resnet50", device="a100", precision="tf32"), zoo("resnet50", device="a100", precision="bf16")
    assert full.size == 2 * half.size == 4 * PARAMETERS["resnet50"]
    assert half.compute < full.compute


@pytest.mark.parametrize(("gpu", "precision", "width"), [("h100", "bf16", 2), ("v100", "fp16", 2), ("k80", "fp32", 4)])
def test_llama_takes_the_nearest_precision_the_device_has(gpu, precision, width):
    w = zoo("llama3_8b", device=gpu, sequence=64)
    assert precision in w.source
    assert w.size == width * PARAMETERS["llama3_8b"]


@pytest.mark.parametrize("throughput", [1, 36.5, 1e6])
def test_throughput_rescales_the_whole_step(throughput):
    free, scaled = zoo("bert_base"), zoo("bert_base", throughput=throughput)
    assert scaled.batch / (scaled.compute + scaled.update) * SECOND == pytest.approx(throughput, rel=1e-4)
    ratio = (scaled.compute + scaled.update) / (free.compute + free.update)
    for before, after in zip(free.layers, scaled.layers, strict=True):
        assert after.forward == pytest.approx(before.forward * ratio, rel=1e-3, abs=1)
    assert scaled.gradients[0].release == scaled.backward
    assert scaled.size == free.size


def test_time_grows_with_batch_and_sequence():
    assert zoo("resnet50", batch=32).compute < zoo("resnet50", batch=64).compute < 2 * zoo("resnet50", batch=32).compute
    assert zoo("bert_base", sequence=512).compute > 4 * zoo("bert_base", sequence=128).compute


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "resnet51"}, r"model: 'resnet51' is unknown; did you mean 'resnet5?"),
        ({"name": None}, "model: None is unknown; .*known: alexnet"),
        ({"batch": 0}, "batch: 0 is not a positive whole number; write e.g. 64"),
        ({"batch": True}, "batch: True is not"),
        ({"throughput": math.nan}, "throughput: nan is not a positive finite number; write e.g. 360"),
        ({"throughput": 0}, "throughput: 0 is not"),
        ({"device": "v1000"}, "device: 'v1000' is unknown; did you mean 'V100'"),
        ({"precision": "fp8"}, "precision: 'fp8' is unknown; known: bf16"),
        ({"precision": "tf32"}, "precision: 'tf32' does not exist on V100; use fp32 or fp16"),
        ({"sequence": 128}, "sequence: 128 means nothing to resnet50, a model of images; leave it out"),
        ({"name": "bert_base", "sequence": 513}, "sequence: 513 is longer than bert_base can be; at most 512 tokens"),
        ({"name": "gpt2", "sequence": 0}, "sequence: 0 is not a positive whole number; write e.g. 1024"),
        ({"throughput": 1e300}, "leaves no time to compute"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        zoo(**{"name": "resnet50", **arguments})


def test_a_net_follows_shapes():
    net = Net(3, 9, 7)
    net.conv("a", 8, (3, 1), stride=2, padding=(1, 0), bias=True)
    assert net.shape == (8, 5, 4)
    net.pool(2, stride=2)
    assert net.shape == (8, 2, 2)
    net.flatten()
    net.linear("b", 10)
    built = net.build()
    assert [(p.name, p.shape) for p in built.parameters] == [
        ("a.weight", (8, 3, 3, 1)),
        ("a.bias", (8,)),
        ("b.weight", (10, 8)),
        ("b.bias", (10,)),
    ]
    assert built.macs == 5 * 4 * 8 * 3 * 3 + 80
    assert [len(operator.forward) for operator in built.operators] == [3, 1]


def test_a_declared_parameter_that_is_never_used_is_a_bug():
    net = Net(4)
    net.declare(["never.weight"])
    with pytest.raises(AssertionError, match=r"never\.weight"):
        net.build()


def test_the_package_exports_lazily():
    assert {"zoo", "zoo_models", "load", "save", "record"} <= set(workload.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'recrod'"):
        workload.recrod  # noqa: B018
