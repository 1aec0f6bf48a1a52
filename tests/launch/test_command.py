"""The command line: options of foretrain, of torchrun and of the script, and errors before anything starts."""

from __future__ import annotations

import os
import signal
from types import SimpleNamespace

import pytest
from torch.distributed import run
from torch.distributed.elastic.multiprocessing import errors
from torch.distributed.elastic.multiprocessing.api import SignalException

from foretrain.cli import main
from foretrain.comm.options import AllReduce, BoundedLoss, ParameterServer, Timeouts
from foretrain.launch import LaunchSettings, command, worker

WORKER = "foretrain.launch.worker"


@pytest.fixture
def started(monkeypatch, tmp_path):
    """What torchrun was started with, in place of starting anything; and a folder with a script in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__main__.py").write_text("")
    jobs = []
    monkeypatch.setattr(run, "run", jobs.append)
    # What the command leaves in the environment of its ranks must not stay in that of the other tests.
    monkeypatch.setenv(command.SECRET, "")
    monkeypatch.delenv(command.SECRET)
    return jobs


def test_what_is_whose(started):
    options = "--nproc 2 --schedule p3(slice=1MB) --compression fp16 --timeout 5s --patience 1min"
    torchruns = "--nnodes 1 --max-restarts=3 -t 3 --rdzv_id a"
    main(f"run {options} {torchruns} -- train.py -- --schedule x -m".split())
    (job,) = started
    assert (job.nproc_per_node, job.nnodes, job.max_restarts, job.tee, job.rdzv_id) == ("2", "1", 3, "3", "a")
    assert (job.module, job.training_script) == (True, WORKER)
    ours = ["--schedule", "p3(slice=1MB)", "--compression", "fp16", "--timeout", "5.0", "--patience", "60.0"]
    theirs = ["train.py", "--", "--schedule", "x", "-m"]
    assert job.training_script_args == [*ours, *theirs]

    heard = worker.parser().parse_args(job.training_script_args)
    assert worker.settings(heard) == LaunchSettings("p3(slice=1MB)", "fp16", timeouts=Timeouts(5, 60))
    assert (heard.module, heard.script) == (False, theirs)


@pytest.mark.parametrize(
    "transport",
    [
        *(BoundedLoss(0.125, "ring"), AllReduce(backend="ring"), ParameterServer(), ParameterServer(updates="servers")),
        ParameterServer(consistency="ssp(3)", elastic=True),
    ],
)
def test_ranks_have_the_transport_of_the_command(transport):
    asked = LaunchSettings(transport=transport, tune=True, quiet=True)
    assert worker.settings(worker.parser().parse_args([*asked.arguments(), "train.py"])) == asked


def test_bounded_loss_is_written_as_text(started):
    main(["run", "--transport", "bounded(tolerance=0.02, ending=early_close, hadamard=true)", "--", "train.py"])
    heard = worker.settings(worker.parser().parse_args(started[0].training_script_args))
    assert heard.transport == BoundedLoss(0.02, ending="early_close", hadamard=True)


@pytest.mark.parametrize("line", ["run -m -- package a", "run --module -- package a", "run -- -m package a"])
def test_a_module(started, line):
    main(line.split())
    heard = worker.parser().parse_args(started[0].training_script_args)
    assert (heard.module, heard.script) == (True, ["package", "a"])
    assert started[0].nproc_per_node == "1"


def test_a_folder(started):
    main(["run", "--", "package"])
    assert started[0].training_script_args[-1] == "package"


def test_one_node_has_a_fresh_secret(started, monkeypatch):
    secrets = []
    for _ in range(2):
        main(["run", "--", "train.py"])
        secrets.append(os.environ[command.SECRET])
    assert secrets[0] != secrets[1]
    assert len(bytes.fromhex(secrets[0])) == 32
    monkeypatch.delenv(command.SECRET)
    assert not any(secrets[0] in text for text in started[0].training_script_args)


def test_several_nodes_have_a_file_or_the_store(started, tmp_path):
    several = ["run", "--nnodes", "1:4", "--rdzv-backend", "c10d", "--rdzv-endpoint", "host:1234"]
    main([*several, "--", "train.py"])
    assert command.SECRET not in os.environ

    secret = tmp_path / "secret"
    secret.write_text("ab" * 32 + "\n")
    secret.chmod(0o600)
    main([*several, "--secret-file", str(secret), "--", "train.py"])
    assert os.environ.pop(command.SECRET) == "ab" * 32


@pytest.mark.parametrize(
    ("content", "mode", "message"),
    [
        (None, 0, "cannot be read (No such file or directory); make one with: openssl rand -hex 32"),
        ("xyz", 0o600, "holds no hexadecimal digits; make one with"),
        ("abcd", 0o600, "holds 2 bytes, fewer than 32; make one with"),
        ("ab" * 32, 0o644, "can be read by other users; chmod 600"),
    ],
)
def test_secrets_that_are_refused(started, tmp_path, capsys, content, mode, message):
    if content:
        (tmp_path / "secret").write_text(content)
        (tmp_path / "secret").chmod(mode)
    with pytest.raises(SystemExit) as ended:
        main(["run", "--secret-file", "secret", "--", "train.py"])
    assert ended.value.code == 2
    assert f"secret-file: 'secret' {message}" in capsys.readouterr().err
    assert started == []


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("run", "script is missing; write e.g. foretrain run --nproc 2 -- train.py"),
        ("run --nproc 2 train.py", "'--nproc 2 train.py' has no '--' before the script"),
        ("run --", "script is missing; write it after '--'"),
        ("run -- trian.py", "script: 'trian.py' is no file; there is none at "),
        ("run -m -- pakcage.train", "module: 'pakcage.train' is not found; run from the folder that has it"),
        ("run --schedule bytescheduller -- train.py", "'bytescheduller' is unknown; did you mean 'bytescheduler'"),
        ("run --schedule p3(credit=1MB) -- train.py", "schedule p3: knob: 'credit' is unknown"),
        ("run --timeout 60 -- train.py", "timeout: '60' is not a time; write e.g."),
        ("run --timeout 0s -- train.py", "timeout: '0s' is no time to wait"),
        ("run --patience 0s -- train.py", "patience: '0s' is no time to wait"),
        ("run --bogus 3 -- train.py", "option: '--bogus' is unknown; "),
        ("run --max-restarts x -- train.py", "options: '--max-restarts x' is refused by torchrun (argument --max-"),
        ("run oops -- train.py", "options: 'oops' is refused by torchrun (it takes 'oops' for the script)"),
        ("run --no-python -- train.py", "'--no-python' leaves nothing to take over; leave it out, or use torchrun"),
        (
            "run --nproc many -- train.py",
            "is refused by torchrun (Unsupported nproc_per_node value: many); torchrun --help",
        ),
        ("run --nnodes a:b -- train.py", "options: '--nnodes a:b' is refused by torchrun (invalid literal"),
        ("run --servers 0 -- train.py", "servers: 0 is no number of servers to start"),
        ("run --servers 1 --snapshot-dir x -- train.py", "snapshot-dir: 'x' is of no use to what"),
        ("run --servers 2 --server-restarts -1 -- train.py", "server-restarts: -1 is no number"),
        ("run --servers 2 --elastic -- train.py", "elastic: '2' would end with any rank of this node"),
        ("run --servers 2 --nnodes 2 -- train.py", "loopback device of one of 2 nodes"),
        ("run --servers 1 --consistency some -- train.py", "consistency: 'some' is unknown"),
        (
            "run --servers 1 --updates workers --consistency async -- train.py",
            "consistency: 'async' cannot be with optimizers on the workers",
        ),
        ("run --updates servers -- train.py", "updates: 'servers' is of no use to all-reduce"),
        ("run --backend mpi -- train.py", "backend: 'mpi' needs ranks that mpirun has started; start the script with"),
        ("run --backend ring --servers 1 -- train.py", "backend: 'ring' is for all-reduce"),
        ("run --servers 1 --over ring -- train.py", "over: 'ring' is for all-reduce; leave --servers out, or this"),
        ("run --servers 1 --transport bounded -- train.py", "transport: 'bounded' is for all-reduce"),
        ("run --over ring -- train.py", "over: 'ring' is of no use without bounded loss"),
        ("run --transport bounded --over ring -- train.py", "over: 'ring' is said by --transport, too"),
        (
            "run --nproc 3 --tolerance 0.01 --over halving_doubling -- train.py",
            "over: 'halving_doubling' needs a power of two of ranks, not 3",
        ),
        ("run --transport ps -- train.py", "transport: 'ps' is not bounded loss; write e.g. 'bounded(tolerance=0.01)'"),
        ("run --transport bounded(ends=soon) -- train.py", "transport: 'ends' is unknown"),
        ("run --consistency async -- train.py", "consistency: 'async' is of no use to all-reduce"),
        ("server --address 0.0.0.0:0 --workers 2", "means every address of this host"),
        ("server --address nowhere --workers 2", "address: 'nowhere' is no address and port"),
        ("server --address 127.0.0.1:0 --workers 0", "workers: 0 is no number of workers"),
        ("server --address 127.0.0.1:0 --workers 2 --shard 2", "shard: 2 is none of 1 servers"),
        ("server --address 127.0.0.1:0 --workers 2 --timeout 0s", "timeout: '0s' is no time to wait"),
        ("server --address 127.0.0.1:0 --workers 2", "nobody is let in without a secret"),
    ],
)
def test_errors_before_anything_starts(started, monkeypatch, capsys, line, message):
    if line.startswith("server") and "secret" not in message:
        monkeypatch.setenv(command.SECRET, "ab" * 32)
    with pytest.raises(SystemExit) as ended:
        main(line.split())
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
    assert started == []


@pytest.mark.parametrize(
    ("code", "name", "status", "message"),
    [(3, "", 3, "rank 1 (process 42) ended with 3 first"), (-9, "SIGKILL", 137, "was killed by SIGKILL first")],
)
def test_exit_status_of_the_first_rank_that_failed(started, monkeypatch, capsys, code, name, status, message):
    failure = SimpleNamespace(exitcode=code, pid=42, signal_name=lambda: name, timestamp=1)

    class Failed(errors.ChildFailedError):
        def __init__(self):
            pass

        def get_first_failure(self):
            return 1, failure

    def fail(_):
        raise Failed

    monkeypatch.setattr(run, "run", fail)
    with pytest.raises(SystemExit) as ended:
        main(["run", "--", "train.py"])
    assert ended.value.code == status
    assert message in capsys.readouterr().err


def test_exit_status_of_a_signal(started, monkeypatch, capsys):
    def interrupted(_):
        raise SignalException("", signal.SIGINT)

    monkeypatch.setattr(run, "run", interrupted)
    with pytest.raises(SystemExit) as ended:
        main(["run", "--", "train.py"])
    assert ended.value.code == 130
    assert "ended by SIGINT" in capsys.readouterr().err
