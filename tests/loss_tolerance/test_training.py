"""Ranks in one process against plain PyTorch, and gradients that are masked exactly as was recorded."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from foretrain.errors import ConfigError, RecordError  # noqa: E402
from foretrain.loss_tolerance import Random, RecordedLosses, Tagging  # noqa: E402
from foretrain.loss_tolerance.replicas import LossyExchange  # noqa: E402
from foretrain.loss_tolerance.training import AccuracyCurve, Training, elapsed, time_to_accuracy, timed  # noqa: E402
from foretrain.loss_tolerance.trial import build_trial, endless, shards  # noqa: E402
from tests.loss_tolerance.trials import build  # noqa: E402

KINDS = ("ring", "halving_doubling", "parameter_server", "transpose")
WAYS = [(way, back) for way in KINDS for back in ("lossy", "reliable")]


def flat(model):
    return torch.cat([one.detach().reshape(-1) for one in model.parameters()])


@pytest.mark.parametrize(("way", "back"), WAYS)
def test_without_losses_it_is_training_on_whole_batches(way, back):
    trial = build_trial(build, 3)
    training = Training(trial, LossyExchange(way, 4, back))
    training.advance(10)

    plain = build_trial(build, 3)
    batches = endless(plain.batches)
    for _ in range(10):
        plain.optimizer.zero_grad()
        plain.loss(plain.model, next(batches)).backward()
        plain.optimizer.step()
    torch.testing.assert_close(flat(trial.model), flat(plain.model), rtol=1e-4, atol=1e-5)
    assert training.curve().drift == pytest.approx(0, abs=1e-6)
    assert training.curve().lost == 0


def gradient(trial, batch):
    trial.model.zero_grad()
    trial.loss(trial.model, batch).backward()
    return torch.cat([one.grad.reshape(-1) for one in trial.model.parameters()])


def test_a_gradient_is_masked_exactly_as_recorded():
    exchange = LossyExchange("parameter_server", 2, "reliable", payload=40)
    trial, plain = build_trial(build, 0), build_trial(build, 0)
    # Worker 1 pushes 30 weights in three packets and the bias in one; the second of the weights is lost.
    lost = RecordedLosses({(0, 1, 0): np.array([False, True, False])})
    Training(trial, exchange, lambda number: [lost]).advance(1)

    parts = [gradient(plain, shard) for shard in shards(plain.batches[0], 2)]
    parts[1][10:20] = 0
    torch.testing.assert_close(flat(trial.model), flat(plain.model) - 0.1 * (parts[0] + parts[1]) / 2)


def test_a_pull_that_is_lost_leaves_the_previous_parameters():
    exchange = LossyExchange("parameter_server", 2, payload=40)
    trial, plain = build_trial(build, 0), build_trial(build, 0)
    # In the first round worker 0 does not get its last ten weights.
    losses = {0: [Random(0), RecordedLosses({(0, 0, 0): np.array([False, False, True])})]}
    training = Training(trial, exchange, lambda number: losses.get(number, [Random(0), Random(0)]))
    training.advance(1)
    served, drift = flat(trial.model), training.curve().drift
    training.advance(1)

    before = flat(plain.model)
    stale = served.clone()
    stale[20:30] = before[20:30]
    parts = []
    for parameters, shard in zip((stale, served), shards(plain.batches[1], 2), strict=True):
        torch.nn.utils.vector_to_parameters(parameters, plain.model.parameters())
        parts.append(gradient(plain, shard))
    velocity = 0.5 * (before - served) / 0.1 + (parts[0] + parts[1]) / 2
    torch.testing.assert_close(flat(trial.model), served - 0.1 * velocity)
    assert drift > 0
    assert training.curve().drift == 0  # the next pull brought what was missed


@pytest.mark.parametrize(
    ("way", "back", "hops"),
    [
        ("ring", "lossy", 3),
        ("halving_doubling", "reliable", 2),
        ("parameter_server", "lossy", 1),
        ("transpose", "reliable", 1),
    ],
)
@pytest.mark.parametrize("by", ["packet", "layer", "magnitude"])
def test_losses_are_as_many_as_asked_for(way, back, hops, by):
    training = Training(build_trial(deep, 1), LossyExchange(way, 4, back, tagging=Tagging(by), payload=16), 0.2, seed=1)
    training.advance(16)

    # By magnitude it is as many as fall below last round's median: none in the first round, and about half later.
    assert training.curve().lost == pytest.approx(0.2 / hops, abs=(0.06 if by == "magnitude" else 0.02) / hops)
    # Only a lossy all-reduce, or pull, lets ranks go apart.
    assert (training.curve().drift > 0) == (back == "lossy")


def deep(seed):
    return build(seed, rate=0.01, layers=4)


def wide(seed):
    """Return a training of one large tensor, a small one, and two biases."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(30, 200), torch.nn.Tanh(), torch.nn.Linear(200, 1))
    return build(seed) | {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.01)}


@pytest.mark.parametrize("by", ["packet", "layer", "magnitude"])
def test_what_bounded_loss_never_loses_arrives_and_the_rest_loses_as_much_more(by):
    exchange = LossyExchange("transpose", 4, "reliable", "reliable", tagging=Tagging(by), payload=16)
    training = Training(build_trial(wide, 0), exchange, 0.2)
    assert [one.reliable for one in training._replicas._push.layout.tensors] == [False, True, True, True]
    training.advance(10)
    assert training.curve().lost == 0
    training.advance(90)
    assert training.curve().lost == pytest.approx(0.9 * 0.2, abs=0.05 if by == "magnitude" else 0.01)


def test_a_model_of_which_nothing_may_be_lost_is_refused():
    with pytest.raises(ConfigError, match=r"small: 'reliable' leaves nothing to lose: .* 16,384 bytes; write lossy"):
        Training(build_trial(build, 0), LossyExchange(small="reliable"))


def test_a_seed_gives_the_same_training():
    curves = [Training(build_trial(build, 1), LossyExchange("ring"), 0.3, seed=5) for _ in range(2)]
    for training in curves:
        training.advance(5)
        training.advance(5)

    assert curves[0].curve() == curves[1].curve()


def test_divergence_is_told_and_not_trained_on():
    training = Training(build_trial(lambda seed: build(seed, rate=1e30), 0), LossyExchange())

    assert np.isnan(training.advance(8))
    assert training.diverged
    assert training.rounds == 8
    assert len(training.curve().losses) < 8


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": None}, r"made\(\) returned a dict without model; it must return an object or a dict"),
        ({"optimizer": "sgd"}, "gave a str as its optimizer"),
        ({"batches": 5}, "gave a int as its batches, not an iterable"),
        ({"model": torch.nn.ReLU()}, "a model without parameters to train"),
        ({"model": torch.nn.Linear(3, 1).double()}, "weight is torch.float64 on cpu; use float32"),
        ({"model": torch.nn.Linear(30, 1)}, "an optimizer of other parameters than its model's"),
    ],
)
def test_what_a_function_may_return_wrong(change, message):
    with pytest.raises(RecordError, match=message):
        build_trial(lambda seed: build(seed) | change, 0, "made")


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"loss": lambda model, batch: model(batch[0])}, RecordError, r"a tensor of shape \(4, 1\)"),
        ({"evaluate": lambda model: "good"}, RecordError, "evaluate returned a str, not a number"),
        ({"batches": []}, RecordError, "batches have ended and cannot be iterated again"),
        ({"batches": iter([(torch.zeros(4, 30), torch.zeros(4))])}, RecordError, "batches have ended"),
        ({"batches": ["text"]}, RecordError, "a batch is a str"),
        ({"batches": [(torch.zeros(3, 30), torch.zeros(3))]}, ConfigError, "workers: 4 are more than the samples"),
    ],
)
def test_what_shows_in_training(change, error, message):
    with pytest.raises(error, match=message):
        Training(build_trial(lambda seed: build(seed) | change, 0), LossyExchange()).advance(2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"way": "rong"}, "did you mean 'ring'"),
        ({"ranks": 1}, "workers: 1 exchange nothing"),
        ({"back": "maybe"}, "known: lossy, reliable"),
    ],
)
def test_an_exchange_that_is_none(options, message):
    with pytest.raises(ConfigError, match=message):
        LossyExchange(**options)


def test_batches_may_be_nested():
    parts = shards({"x": torch.arange(5), "y": [torch.arange(5), torch.ones(5, 2)]}, 2)

    assert [len(part["x"]) for part in parts] == [3, 2]
    assert parts[1]["y"][0].tolist() == [3, 4]


def test_time_to_accuracy_is_rounds_at_the_times_of_the_network():
    curve = AccuracyCurve((2, 4, 6), (0.5, 0.8, 0.9), (), 0.0, 0.0)

    assert [elapsed(rounds, [10, 20, 5]) for rounds in (0, 1, 3, 7)] == [0, 10, 35, 80]
    assert timed(curve, np.array([10, 20, 5])) == [(30, 0.5), (45, 0.8), (70, 0.9)]
    assert time_to_accuracy(curve, [7], 0.8) == 28
    assert time_to_accuracy(curve, [7], 0.95) is None
    with pytest.raises(ConfigError, match="no times of iterations"):
        elapsed(3, [])
