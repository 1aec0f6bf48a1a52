"""Comparisons by which a script does something on its last rank alone."""

from pathlib import Path

import pytest

pytest.importorskip("torch")

from foretrain.live.device.represented import _line_of_comparison


@pytest.mark.parametrize(
    ("assigned", "expression", "found"),
    [
        ("world = dist.get_world_size()", "rank == world - 1", True),
        ("me, n = dist.get_rank(), dist.get_world_size()", "n - 1 == me", True),
        ("n = int(os.environ['WORLD_SIZE'])", "dist.get_rank() == n - 1", True),
        ("r, n = int(os.environ['RANK']), int(os.environ['WORLD_SIZE'])", "r == n - 1", True),
        ('r: int = int(os.environ.get("RANK", 0))', "r == int(environ.get('WORLD_SIZE', '1')) - 1", True),
        ("r = int(os.getenv('RANK', '-1'))", "r + 1 == int(os.getenv('WORLD_SIZE'))", True),
        ("self.r = dist.get_rank()", "self.r >= world_size - 1", True),
        ("n = dist.get_world_size(); last = n - 1", "last <= rank", True),
        ("r = int(os.environ['LOCAL_RANK'])", "r == world_size - 1", False),
        ("n = int(os.environ['LOCAL_WORLD_SIZE'])", "rank == n - 1", False),
        ("n = dist.get_world_size(group)", "rank == n - 1", False),
        ("stages = 4", "rank == stages - 1", False),
    ],
)
def test_the_last_rank_is_known_by_what_variables_are_assigned(
    tmp_path: Path, assigned: str, expression: str, found: bool
) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"{assigned}\nif {expression}:\n    pass\n")
    assert _line_of_comparison(str(script)) == (2 if found else None)


@pytest.mark.parametrize(
    ("expression", "found"),
    [
        ("dist.get_rank() == dist.get_world_size() - 1", True),
        ("_safe_get_rank() == (torch.distributed.get_world_size() - 1)", True),
        ("args.world_size - 1 == args.rank", True),
        ("global_rank == world_size - 1", True),
        ("rank + 1 == world_size", True),
        ("world_size == 1 + rank", True),
        ("rank >= world_size - 1", True),
        ("world_size - 1 <= rank", True),
        ("rank <= world_size - 1", False),
        ("rank + 1 < world_size", False),
        ("rank + 2 == world_size", False),
        ("rank - 1 == world_size", False),
        ("pp_rank == pp_world_size - 1", False),
        ("self.pp_rank == self.pp_world_size - 1", False),
        ("rank == dist.get_world_size(group) - 1", False),
        ("rank == world_size", False),
        ("rank != world_size - 1", False),
        ("rank == 0", False),
    ],
)
def test_the_last_rank_is_known_by_its_names(tmp_path: Path, expression: str, found: bool) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"import torch\n\nif {expression}:\n    pass\n")
    assert _line_of_comparison(str(script)) == (3 if found else None)


def test_a_file_that_is_no_python_has_none(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("rank == world_size - 1 (")
    assert _line_of_comparison(str(script)) is None
    assert _line_of_comparison(str(tmp_path / "absent.py")) is None
