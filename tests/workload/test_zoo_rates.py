"""The zoo's own estimates against published training rates of one GPU, in samples per second.

    DLE   NVIDIA DeepLearningExamples: PyTorch ResNet-50 v1.5 (21.03), BERT (20.06, heads included), Transformer (2019)
    TFB   TensorFlow performance benchmarks, May 2017, synthetic data
    LAM   Lambda, RTX 2080 Ti deep learning benchmarks with TensorFlow, March 2019
    PUG   Puget Systems, RTX 3090 TensorFlow 1.15 results, October 2020

The fractions in `foretrain.device.presets` were fitted to most of these rows, so the bands say how well one small set
of constants explains them, not how well it predicts.
"""

import pytest

from foretrain.units import SECOND
from foretrain.workload import zoo

PUBLISHED = [
    ("resnet50", "v100", "fp32", 128, 367, "DLE"),
    ("resnet50", "v100", "fp32", 64, 405, "LAM"),
    ("vgg16", "v100", "fp32", 64, 235, "LAM"),
    ("resnet152", "v100", "fp32", 64, 155, "LAM"),
    ("inception_v3", "v100", "fp32", 64, 259, "LAM"),
    ("resnet50", "v100", "fp16", 256, 1200, "DLE"),
    ("resnet50", "a100", "tf32", 256, 938, "DLE"),
    ("resnet50", "a100", "fp16", 256, 2470, "DLE"),
    ("resnet50", "p100", "fp32", 64, 219, "TFB"),
    ("resnet152", "p100", "fp32", 64, 91.8, "TFB"),
    ("inception_v3", "p100", "fp32", 64, 142, "TFB"),
    ("alexnet", "p100", "fp32", 512, 2987, "TFB"),
    ("vgg16", "p100", "fp32", 64, 154, "TFB"),
    ("resnet50", "k80", "fp32", 64, 51.9, "TFB"),
    ("resnet152", "k80", "fp32", 32, 20.0, "TFB"),
    ("inception_v3", "k80", "fp32", 64, 30.5, "TFB"),
    ("alexnet", "k80", "fp32", 512, 656, "TFB"),
    ("vgg16", "k80", "fp32", 32, 35.4, "TFB"),
    ("resnet50", "2080ti", "fp32", 64, 294, "LAM"),
    ("resnet152", "2080ti", "fp32", 32, 110, "LAM"),
    ("inception_v3", "2080ti", "fp32", 64, 194, "LAM"),
    ("resnet50", "2080ti", "fp16", 64, 467, "LAM"),
    ("resnet50", "rtx3090", "tf32", 96, 561, "PUG"),
    ("resnet50", "rtx3090", "fp16", 192, 1163, "PUG"),
]


@pytest.mark.parametrize(("name", "gpu", "precision", "batch", "published", "source"), PUBLISHED)
def test_image_rates_are_plausible(name, gpu, precision, batch, published, source):
    w = zoo(name, device=gpu, precision=precision, batch=batch)
    assert w.batch / (w.compute + w.update) * SECOND == pytest.approx(published, rel=0.3), source


@pytest.mark.parametrize(
    ("name", "gpu", "precision", "batch", "sequence", "published"),
    [
        ("bert_large", "v100", "fp32", 8, 128, 42),
        ("bert_large", "v100", "fp16", 16, 128, 173),
        ("bert_large", "v100", "fp16", 4, 512, 36),
        ("bert_large", "a100", "tf32", 54, 128, 234),
        ("bert_large", "a100", "fp16", 64, 128, 415),
        ("bert_large", "a100", "fp16", 16, 512, 78),
        ("transformer_big", "v100", "fp32", 80, 32, 7635 / 32),
        ("transformer_big", "v100", "fp16", 160, 32, 32153 / 32),
    ],
)
def test_rates_of_sequences_are_plausible(name, gpu, precision, batch, sequence, published):
    w = zoo(name, device=gpu, precision=precision, batch=batch, sequence=sequence)
    # BERT's were published with many accumulated micro-batches, so that the update does not count.
    step = w.compute if name == "bert_large" else w.compute + w.update
    assert 0.75 < w.batch / step * SECOND / published < 1.3
