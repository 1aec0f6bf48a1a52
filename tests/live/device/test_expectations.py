"""What counting operators find where there is nothing to count."""

from __future__ import annotations

from pathlib import Path

from tests.live.device.simulated import simulated


def test_unknown_values_are_counted_as_capacity_is_planned(tmp_path: Path) -> None:
    done = simulated(
        tmp_path,
        """
        choices = torch.randint(8, (100_003,), device="cuda")
        assert choices.bincount(minlength=8).tolist() == [12501] * 3 + [12500] * 5
        assert choices.float().histc(4, 0, 8).tolist() == [25001] * 3 + [25000]
        assert choices.bincount(choices.double(), minlength=8).shape == (8,)
        assert (choices > 3).nonzero().shape == (100_003, 1)
        assert choices[choices > 3].shape == (100_003,)
        rows = torch.empty(100, 50, 8, device="cuda")
        assert rows[:, torch.empty(50, 8, device="cuda") > 0].shape == (100, 400)
        rows[rows > 1] = 0
        rows[rows > 1] = torch.empty(40_000, device="cuda")
        assert torch.isfinite(choices.float()).all() and not torch.isnan(choices.float()).any()
        assert choices.unique().shape == (100_003,)
        values, inverse, counts = choices.view(-1, 1).unique(dim=0, return_inverse=True, return_counts=True)
        assert values.shape == (100_003, 1) and inverse.shape == counts.shape == (100_003,)
        try:
            choices.bincount()
        except RuntimeError as error:
            assert "minlength" in str(error)
        else:
            raise AssertionError
        """,
    )
    assert "taken to be balanced" in done.stdout


def test_known_values_are_counted(tmp_path: Path) -> None:
    simulated(
        tmp_path,
        """
        choices = torch.tensor([3, 0, 3, 1], device="cuda")
        assert choices.bincount().tolist() == [1, 1, 0, 2]
        assert choices[choices > 0].tolist() == [3, 3, 1]
        assert not (choices > 0).all()
        choices[choices > 0] = torch.tensor([7, 8, 9], device="cuda")
        assert choices.tolist() == [7, 0, 8, 9]
        assert choices.unique().tolist() == [0, 7, 8, 9]
        """,
    )


def test_what_ranks_tell_each_other_of_expected_counts_agrees(tmp_path: Path) -> None:
    simulated(
        tmp_path,
        """
        counts = torch.randint(32, (100_003,), device="cuda").bincount(minlength=32)
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts)
        assert arriving.view(8, 4).tolist() == [counts[dist.get_rank() * 4:][:4].tolist()] * 8
        rows = torch.empty(sum(arriving.tolist()), 16, device="cuda")
        tokens = torch.empty(100_003, 16, device="cuda")
        dist.all_to_all_single(rows, tokens, arriving.view(8, 4).sum(1).tolist(), counts.view(8, 4).sum(1).tolist())
        """,
        "--live",
        "all",
    )
