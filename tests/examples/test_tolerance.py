"""The examples of `foretrain tolerance` learn, and are scripts that a user would write."""

import pytest

torch = pytest.importorskip("torch")

from foretrain.loss_tolerance.replicas import LossyExchange  # noqa: E402
from foretrain.loss_tolerance.training import Training  # noqa: E402
from foretrain.loss_tolerance.trial import build_trial  # noqa: E402
from tests.examples.torchrun import ROOT  # noqa: E402
from tests.processes import module_at  # noqa: E402

EXAMPLES = sorted((ROOT / "examples" / "tolerance").glob("*.py"))


def accuracies(name, rounds, p):
    before = torch.get_num_threads()
    build = module_at(ROOT / "examples" / "tolerance" / f"{name}.py").build
    training = Training(build_trial(build, 0), LossyExchange(ranks=2), p)
    found = [training.advance(count) for count in rounds]
    torch.set_num_threads(before)
    return found


def test_digits_are_learnt_with_losses():
    pytest.importorskip("sklearn")
    first, last = accuracies("digits", (2, 60), 0.05)

    assert first < 0.7 < 0.85 < last


def test_characters_are_learnt_with_losses():
    first, last = accuracies("characters", (1, 45), 0.05)

    assert first < last
    assert last > 0.18  # a space, always, is right 17 times in 100


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_is_what_a_user_would_write(path):
    text = path.read_text(encoding="utf-8")

    assert "import foretrain" not in text
    assert "foretrain tolerance examples/tolerance/" in text
    assert len(text.splitlines()) < 100
