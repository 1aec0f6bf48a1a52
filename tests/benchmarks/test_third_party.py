"""Commands of public repositories: the table is whole, and what cannot run says what it needs."""

import re
import string
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import third_party  # noqa: E402  # pyright: ignore[reportMissingImports]
from third_party import Outcome, Row, Source  # noqa: E402  # pyright: ignore[reportMissingImports]

SOURCE = Source("repo", "owner/repo", "0" * 40)


def test_rows_name_sources_and_no_two_are_alike() -> None:
    sources, rows = third_party.table()
    assert all(re.fullmatch("[0-9a-f]{40}", source.commit) for source in sources.values())
    assert {row.source for row in rows} == sources.keys()
    assert len({row.name for row in rows}) == len(rows)
    for row in rows:
        words = {word for _, word, _, _ in string.Formatter().parse(f"{row.command} {row.shorter}") if word}
        assert words <= sources[row.source].words.keys()


def test_kept_outcomes_are_of_rows_that_there_are() -> None:
    _, rows = third_party.table()
    assert third_party.read_kept().keys() <= {row.name for row in rows}


def test_a_row_without_checkout_or_packages_is_skipped_with_what_to_do(tmp_path: Path) -> None:
    absent = third_party.outcome_of(Row("repo", "trains", "train.py"), SOURCE, tmp_path)
    assert "git clone https://github.com/owner/repo repo" in absent.skipped
    (tmp_path / "repo").mkdir()
    lacking = third_party.outcome_of(Row("repo", "trains", "train.py", needs=("no_such_package",)), SOURCE, tmp_path)
    assert lacking.skipped == "pip install no_such_package"
    older = third_party.outcome_of(Row("repo", "trains", "train.py", needs=("pytest<1",)), SOURCE, tmp_path)
    assert older.skipped == "pip install 'pytest<1'"


def test_a_folder_or_a_row_that_there_is_not_is_named(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"there is no folder '.*/none'"):
        third_party.run(tmp_path / "none", "")
    with pytest.raises(SystemExit, match="no row begins with 'nosuch'; they begin with one of nanoGPT, picotron"):
        third_party.run(tmp_path, "nosuch")


def test_needs_are_what_pip_takes() -> None:
    _, rows = third_party.table()
    needs = {Requirement(need).name for row in rows for need in row.needs}
    assert needs.isdisjoint({"hydra", "sklearn", "torch_checkpointing", "spmd_types"})


def test_the_terminal_tells_live_ranks_and_another_commit() -> None:
    row = Row("repo", "trains", "train.py")
    told = third_party._told(row, Outcome(step=1e-3, commit="1" * 40, live=2, seconds=3.4), SOURCE)
    assert told.split() == ["repo:", "trains", "1.00", "ms", "3", "s", "2", "live", "works", "at", "1" * 12]
    assert third_party._told(row, Outcome(step=1e-3), SOURCE).endswith("works at an unknown commit")
    assert third_party._told(row, Outcome(skipped="no"), SOURCE).endswith("skipped: no")


def test_an_outcome_under_a_shorter_limit_says_so() -> None:
    row = Row("repo", "trains", "train.py", limit=2400)
    assert third_party._why(row, Outcome(error="no end after 900 s", seconds=900)).endswith("that is now 2,400 s")
    assert third_party._why(row, Outcome(error="no end after 2400 s", seconds=2400)) == "`no end after 2400 s`"


def test_another_commit_is_told_in_the_row() -> None:
    row = Row("nanoGPT", "trains", "train.py", "--max_iters=3")
    line = third_party._line(row, Outcome(step=1e-3, commit="1" * 40, live=2, seconds=3.4), SOURCE)
    assert line == f"| trains | `train.py` [`--max_iters=3`] | dgx-h100:1 | works at {'1' * 12} | 1.00 ms | 2 | 3 s |"


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (
            'Traceback\n  File "a"\nValueError: first\nTraceback\n  File "b"\nKeyError: last\nforetrain: x',
            "KeyError: last",
        ),
        (
            "noise\nforetrain: rank 0 left with exit status 3 at train.py:3: sys.exit(3)\n",
            "foretrain: rank 0 left with",
        ),
    ],
)
def test_errors_are_named_by_the_last_exception(text: str, error: str) -> None:
    assert third_party.first_error(text).startswith(error)


def test_live_ranks_are_those_of_the_last_start() -> None:
    told = (
        "foretrain: 8 ranks in 1 class\nforetrain: starting again with 2 live ranks: …\nforetrain: 8 ranks in 2 classes"
    )
    assert third_party._live_ranks(told) == 2
    assert third_party._live_ranks("foretrain: all 1,024 ranks live") == 1024
    assert third_party._live_ranks("foretrain: 1 rank") == 1


def test_data_is_of_the_form_that_repositories_download(tmp_path: Path) -> None:
    np = pytest.importorskip("numpy")
    subprocess.run([sys.executable, third_party.DATA, "nanogpt", "data/some"], cwd=tmp_path, check=True)
    tokens = np.fromfile(tmp_path / "data/some/train.bin", np.uint16)
    assert len(tokens) == 2_000_000
    assert tokens.max() < 50257


def test_the_page_tells_shares_and_why_what_fails_does(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    table = tmp_path / "table.toml"
    table.write_text(
        '[sources.repo]\nrepository = "owner/repo"\ncommit = "abc"\nwords = { SIZE = "--layers 2" }\n'
        '[[rows]]\nsource = "repo"\nfeature = "one"\ncommand = "train.py {SIZE}"\n'
        '[[rows]]\nsource = "repo"\nfeature = "two"\ncommand = "other.py"\nwhy = "it calls home"\n'
        'needs = ["einops", "transformers<5"]\n[[untried]]\nwhat = "the third"\nwhy = "it is large"\n'
    )
    read, untried = third_party.table, third_party.untried
    monkeypatch.setattr(third_party, "table", lambda: read(table))
    monkeypatch.setattr(third_party, "untried", lambda: untried(table))
    seen = {"date": "2026-01-02", "python": "3.11.7", "torch": "2.13.0", "commit": "abc", "live": 1}
    here = {"cpu": "2 cores of any", "foretrain": "1234567"}
    outcomes = {"repo: one": Outcome(step=0.5, **seen, **here), "repo: two": Outcome(error="OSError: no", **seen)}
    page = third_party.markdown(outcomes)
    assert "1 of 2 commands" in page
    assert "simulated on 2026-01-02 on 2 cores of any, on a machine that is not recorded." in page
    assert "Commit of foretrain: `1234567`, one that is not recorded." in page
    assert "`pip install einops 'transformers<5'`" in page
    assert "- the third: it is large" in page
    assert "`{SIZE}` stands for `--layers 2`." in page
    assert "- repo: two: it calls home (`OSError: no`)" in page
    assert third_party.share(outcomes) == 0.5


def test_a_second_run_begins_with_what_the_first_has_left(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    folder = tmp_path / SOURCE.name
    folder.mkdir()
    (folder / "train.py").write_text(
        "import sys, torch\n"
        "from pathlib import Path\n"
        "assert Path('left').exists() == ('--load' in sys.argv), 'not as it was left'\n"
        "weight = torch.nn.Parameter(torch.ones(1, device='cuda'))\n"
        "weight.sum().backward()\n"
        "torch.optim.SGD([weight]).step()\n"
        "Path('left').touch()\n",
        encoding="utf-8",
    )

    twice = third_party.outcome_of(Row("repo", "trains", "train.py", cluster="H100", then="--load"), SOURCE, tmp_path)
    loaded = third_party.outcome_of(Row("repo", "trains", "train.py --load", cluster="H100"), SOURCE, tmp_path)

    assert (twice.error, loaded.error) == ("", "AssertionError: not as it was left")
    assert twice.step is not None
