"""Collectives of tensors whose sizes differ from member to member: real values where they can be known, else none."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.live.device.simulated import simulated

CLUSTER = "dgx-h100:1,ranks=0-3"
SCRIPT = """
    rank, ranks = dist.get_rank(), range(dist.get_world_size())
    whole = os.environ["LIVE"] == "all"

    def has_values(tensor):
        return not tensor.numel() or "..." not in repr(tensor)

    def check(found, expected):
        assert found.shape == expected.shape
        if whole or has_values(found):
            assert has_values(found)
            assert found.tolist() == expected.tolist(), (found.tolist(), expected.tolist())

    gpu = "cuda"
    gathered = [torch.zeros(k + 1, device=gpu) for k in ranks]
    dist.all_gather(gathered, torch.full((rank + 1,), rank + 0.5, device=gpu))
    for k in ranks:
        check(gathered[k], torch.full((k + 1,), k + 0.5))
    check(gathered[rank], torch.full((rank + 1,), rank + 0.5))

    parts = [torch.arange(k + 1.0, device=gpu) + 10 * k for k in ranks]
    mine = torch.zeros(rank + 1, device=gpu)
    dist.reduce_scatter(mine, parts)
    assert has_values(mine)
    assert mine.tolist() == ((torch.arange(rank + 1.0) + 10 * rank) * len(ranks)).tolist(), mine.tolist()

    # Rank r sends (r + k) % 3 rows of 2 to rank k, each of them 10 r + k.
    sent, got = ([(rank + k) % 3 for k in ranks] for _ in range(2))
    rows = torch.cat([torch.full((count, 2), 10.0 * rank + k) for k, count in enumerate(sent)]).to(gpu)
    expected = torch.cat([torch.full((count, 2), 10.0 * k + rank) for k, count in enumerate(got)])
    out = torch.zeros(sum(got), 2, device=gpu)
    dist.all_to_all_single(out, rows, got, sent)
    check(out, expected)

    outs = [torch.zeros(count, device=gpu) for count in got]
    dist.all_to_all(outs, [torch.full((count,), 10.0 * rank + k, device=gpu) for k, count in enumerate(sent)])
    for k, found in enumerate(outs):
        check(found, torch.full((got[k],), 10.0 * k + rank))

    out = torch.zeros(len(ranks), device=gpu)
    dist.all_to_all_single(out, 10.0 * rank + torch.arange(len(ranks), device=gpu))
    assert has_values(out)
    assert not whole or out.tolist() == [10.0 * k + rank for k in ranks]
"""


@pytest.mark.parametrize("live", ["all", "1"])
def test_values_are_those_of_who_sent_them_or_none(tmp_path: Path, live: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIVE", live)
    simulated(tmp_path, SCRIPT, "--live", live, cluster=CLUSTER)
