import math

import pytest

pytest.importorskip("torch")

from foretrain.errors import ConfigError, RecordError
from foretrain.loss_tolerance.replicas import LossyExchange
from foretrain.loss_tolerance.tolerance import ToleranceSettings, interval, profile, student_t
from tests.loss_tolerance.trials import build


@pytest.mark.parametrize("freedom", [1, 2, 9, 30, 101])
@pytest.mark.parametrize("probability", [0.5, 0.95, 0.9995])
def test_students_quantiles(freedom, probability):
    from scipy import stats  # takes a second, which who only collects tests need not wait

    assert student_t(probability, freedom) == pytest.approx(stats.t.ppf(probability, freedom), rel=1e-9, abs=1e-12)


def test_the_test_is_the_paired_one():
    from scipy import stats

    before, after, margin = [0.90, 0.92, 0.91, 0.93], [0.89, 0.92, 0.90, 0.93], 0.02
    differences = [b - a for a, b in zip(before, after, strict=True)]
    p_value = stats.ttest_rel([b + margin for b in after], before, alternative="greater").pvalue

    assert not interval(differences, p_value * 0.99).not_worse(margin)
    assert interval(differences, p_value * 1.01).not_worse(margin)


def test_a_training_that_diverged_is_not_shown_to_be_as_good():
    assert not interval([0.0, math.nan, 0.0]).not_worse(1.0)
    with pytest.raises(ConfigError, match="seeds: 1 show no spread"):
        interval([0.1])


SMALL = ToleranceSettings(LossyExchange(payload=16), (0.0, 0.05, 1.0), seeds=3, rounds=60, evaluations=6)


def test_a_profile_finds_what_a_model_tolerates():
    told = []
    found = profile(build, SMALL, progress=lambda *now: told.append(now))
    none, little, all_ = found.levels

    assert none.difference.low == none.difference.high == 0
    assert none.slower == 1
    assert little.not_worse
    assert not all_.not_worse  # nothing arrives, so nothing is learnt
    assert all_.reached == (None,) * 3
    assert all_.lost == 1
    assert found.tolerable == found.with_more_rounds == 0.05
    assert all_.curves[0].rounds[-1] == 120
    assert [done for _, done, _ in told] == list(range(1, len(told) + 1))
    assert told[-1][1] == told[-1][2]
    assert found.to_dict()["levels"][2]["accuracies"] == all_.accuracies


def test_a_gap_in_the_grid_ends_what_is_tolerable():
    settings = ToleranceSettings(
        LossyExchange(payload=16), (0.0, 0.9, 0.95), seeds=2, rounds=30, margin=0.0, evaluations=3
    )

    assert profile(build, settings).tolerable == 0


def test_a_model_that_diverges_anyway_is_an_error():
    with pytest.raises(RecordError, match=r"wild\(0\) diverges without any loss; lower its learning rate"):
        profile(lambda seed: build(seed, rate=1e30), SMALL, name="wild")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"grid": (0.01, 0.1)}, r"does not rise from 0"),
        ({"grid": (0.0, 1.2)}, r"grid\[1\]: 1.2 is no probability"),
        ({"rounds": 0}, "rounds: 0 is below 1"),
        ({"more": 0.5}, "more: 0.5 is below 1"),
        ({"margin": -1.0}, "margin: -1.0 is no difference"),
        ({"evaluations": 99, "rounds": 9}, "evaluations: 99 do not fit the rounds"),
        ({"alpha": 0.5}, "alpha: 0.5 is no level"),
    ],
)
def test_settings_that_are_wrong(options, message):
    with pytest.raises(ConfigError, match=message):
        ToleranceSettings(**options)
