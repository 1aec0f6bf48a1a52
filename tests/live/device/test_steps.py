"""What the hooks around an optimizer's step make of a script: where it ends, and which memory is for what."""

import json
from pathlib import Path

from tests.live.device.simulated import simulated


def test_script_that_swallows_every_exception_makes_no_step_too_many(tmp_path: Path) -> None:
    numbers = tmp_path / "numbers.json"
    simulated(
        tmp_path,
        """
        weight = torch.nn.Parameter(torch.ones(64, 64, device="cuda"))
        optimizer = torch.optim.SGD([weight])
        for _ in range(20):
            try:
                (weight @ weight).sum().backward()
                optimizer.step()
            except:
                pass
        """,
        *("--steps", "4", "--json", str(numbers)),
    )
    assert len(json.loads(numbers.read_text())["ranks"][0]["steps"]) == 4


def test_state_of_an_optimizer_that_was_loaded_is_its_state(tmp_path: Path) -> None:
    numbers = tmp_path / "numbers.json"
    simulated(
        tmp_path,
        """
        def adam():
            weight = torch.nn.Parameter(torch.ones(4096, 4096, device="cuda"))
            return weight, torch.optim.Adam([weight])

        def train(weight, optimizer):
            for _ in range(3):
                weight.sum().backward()
                optimizer.step()

        weight, optimizer = adam()
        train(weight, optimizer)
        saved = {"state": {0: {name: value.cpu() for name, value in optimizer.state[weight].items()}}}
        saved["param_groups"] = optimizer.state_dict()["param_groups"]
        del weight, optimizer
        weight, optimizer = adam()
        optimizer.load_state_dict(saved)
        ballast = torch.empty(4096, 4096, device="cuda")
        train(weight, optimizer)
        """,
        *("--json", str(numbers)),
    )
    memory = json.loads(numbers.read_text())["ranks"][0]["memory"]
    breakdown = memory["breakdown"]
    assert breakdown["optimizer"] >= 2 * 4096 * 4096 * 4
    assert breakdown["activations"] < 2 * 4096 * 4096 * 4
