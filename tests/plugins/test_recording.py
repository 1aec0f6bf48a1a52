"""Workloads of Keras' and JAX's steps: `foretrain record` in a process, and the file that it writes."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from foretrain.plugins.gradient_stream import recorded
from foretrain.workload.file import load
from foretrain.workload.step import Gradient, Layer, Workload
from tests.processes import foretrain, need

pytestmark = pytest.mark.process
SCRIPT = """
def keras():
    import keras
    import numpy as np

    layers = [keras.layers.Dense(size, name=name) for name, size in (("front", 256), ("back", 8))]
    model = keras.Sequential([keras.Input((64,)), *layers], name="small")
    model.compile("sgd", "mse")
    x, y = np.ones((16, 64), np.float32), np.ones((16, 8), np.float32)
    return model, lambda: model.train_on_batch(x, y), 16

def jax():
    import jax.numpy as jnp

    params = {"back": jnp.ones((256, 8)), "front": {"w": jnp.ones((64, 256)), "b": jnp.ones(256)}}

    def small(params, x):
        return ((x @ params["front"]["w"] + params["front"]["b"]) @ params["back"]).sum()

    return small, (params, jnp.ones((16, 64))), 16

def idle():
    model, _, batch = keras()
    return model, lambda: None, batch
"""
ENVIRONMENT = {"KERAS_BACKEND": "tensorflow", "CUDA_VISIBLE_DEVICES": "-1", "JAX_PLATFORMS": "cpu"}


@pytest.mark.parametrize(
    ("framework", "sizes"),
    [
        (
            "keras",
            {
                **{"small.front.kernel": 64 * 256 * 4, "small.front.bias": 256 * 4},
                **{"small.back.kernel": 256 * 8 * 4, "small.back.bias": 8 * 4},
            },
        ),
        ("jax", {"back.value": 256 * 8 * 4, "front.w": 64 * 256 * 4, "front.b": 256 * 4}),
    ],
)
def test_a_recorded_step_is_a_workload(tmp_path, monkeypatch, framework, sizes):
    need({"keras": "tensorflow"}.get(framework, framework), framework)
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "train.py").write_text(SCRIPT)
    ended = foretrain("record", f"train.py:{framework}", "--out", "small.toml", cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    workload = load(tmp_path / "small.toml")
    assert (workload.name, workload.batch) == ("small", 16)
    assert {gradient.name: gradient.size for gradient in workload.gradients} == sizes
    assert {workload.layers[gradient.layer].name for gradient in workload.gradients} == {
        name.rpartition(".")[0] for name in sizes
    }
    assert workload.forward > 0
    assert workload.backward > 0
    assert "median of 12 steps" in workload.source


@pytest.mark.parametrize(("until_first", "late", "warned"), [(9, 4, False), (5, 0, False), (2, 0, True)])
def test_a_forward_pass_that_was_computed_alone_is_taken_out_of_the_step(until_first, late, warned, caplog):
    alone = 5
    layers = tuple(Layer(name, forward=(until_first + alone) // 2, backward=1) for name in ("a", "b"))
    layers = (replace(layers[0], forward=until_first + alone - layers[1].forward), layers[1])
    gradients = (Gradient("b.w", 8, 1, 0), Gradient("a.w", 8, 0, 1))
    seen = SimpleNamespace(workload=Workload("seen", 1, layers, gradients, source=""))
    found = recorded(seen, "small", 1, "", alone)  # pyright: ignore[reportArgumentType]
    assert found.forward == pytest.approx(min(alone, until_first), abs=1)
    assert found.backward == 2 + late
    assert [each.release for each in found.gradients] == [late, late + 1]
    assert bool(caplog.records) == warned


def test_a_step_that_trains_nothing_is_refused(tmp_path, monkeypatch):
    need("tensorflow", "keras")
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "train.py").write_text(SCRIPT)
    ended = foretrain("record", "train.py:idle", cwd=tmp_path)
    assert ended.returncode != 0
    assert "step() has not trained small: let it call train_on_batch() or fit() once" in ended.stderr
    assert not (tmp_path / "workload.toml").exists()
