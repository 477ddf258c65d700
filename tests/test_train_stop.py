"""A run stopped by a signal at any moment loses nothing when the same command resumes it."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import train
from experiments.reliability.processes import start_process
from experiments.reliability.stops import PHASES, start_alone, train_and_stop
from tests.training_runs import call_on_two_processes, losses
from training.checkpoint.folders import checkpoints, step_of
from training.command_line import user_errors_as_messages
from training.metrics import read_metrics

SPEED = "tokens_per_s", "gpu_hours", "memory_gib"


WORDS = {
    signal.SIGINT: "interrupted",
    signal.SIGTERM: "terminated",
    signal.SIGHUP: "hung up",
    signal.SIGUSR1: "stopped by SIGUSR1",
}


@pytest.fixture(scope="module")
def whole(make_run, tmp_path_factory):
    run = make_run(tmp_path_factory.mktemp("whole"))
    run()
    return run


def records_without_speed(folder):
    return [
        {name: value for name, value in record.items() if name not in SPEED}
        for record in read_metrics(folder)
    ]


@pytest.mark.parametrize(
    ("phase", "number"),
    [
        *((phase, signal.SIGTERM) for phase in PHASES),
        *(("training", number) for number in (signal.SIGUSR1, signal.SIGHUP, signal.SIGINT)),
    ],
)
def test_one_process_saves_when_stopped(run, whole, tmp_path, phase, number):
    saved = PHASES[phase].saved
    log = tmp_path / "log"
    process = start_process(start_alone, log, [str(run.config)], phase, number, 0)
    process.join(60)
    said = log.read_text().splitlines()[-1]
    word = WORDS[number]
    if saved is None:
        assert process.exitcode == 128 + number
        assert said.startswith(f"{word} at step 0: the same command starts again")
    else:
        assert process.exitcode == (128 + number if number == signal.SIGINT else 0)
        newest = checkpoints(run.out_dir)[-1]
        step = step_of(newest)
        assert saved <= step <= saved + (phase == "saving")  # saved in parallel with the next step
        assert said == f"{word} at step {step}: the same command resumes from {newest}"
    run()
    assert records_without_speed(run.out_dir) == records_without_speed(whole.out_dir)


@pytest.mark.parametrize("n_processes", [1, pytest.param(2, marks=pytest.mark.distributed)])
def test_stopping_in_the_first_step_after_a_resume(run, tmp_path, n_processes):
    """The run does not wait for a step that may compile for minutes; earlier steps are saved."""
    run("optim.max_steps=4")
    newest = checkpoints(run.out_dir)[-1]
    called = ([str(run.config)], "first step", signal.SIGTERM)
    if n_processes == 1:
        process = start_process(start_alone, tmp_path / "log", *called, 0)
        process.join(60)
        ended, said = [process.exitcode], (tmp_path / "log").read_text()
    else:  # torchrun sends the signal to each process
        ends = call_on_two_processes(tmp_path, train_and_stop, *called, None)
        ended, said = [status for status, _ in ends], ends[0][1]
    assert ended == [0] * n_processes
    assert f"terminated at step 4: the same command resumes from {newest}\n" in said
    run()
    assert list(losses(run.out_dir)) == [*range(1, 9)]


def test_stopping_while_ruined_weights_skip_steps(run, tmp_path):
    """The checkpoint saved then is not good, and does not evict a good one."""
    options = ["optim.schedule=constant", "run.save_every=1", "run.keep_last=1"]
    run("optim.max_steps=4", *options)
    ruin = ["optim.lr=1e20", "optim.warmup_steps=0", "optim.max_steps=40", "run.max_skipped=6"]
    argv = [str(run.config), *options, *ruin, "run.eval_every=99"]
    process = start_process(start_alone, tmp_path / "log", argv, "training", signal.SIGTERM, 0)
    process.join(60)
    assert process.exitcode == 0
    assert [step_of(folder) for folder in checkpoints(run.out_dir)] == [4, 5, 7]
    message = r"step_00000004 is the newest with .*, delete step_00000005, step_00000007"
    with pytest.raises(FloatingPointError, match=message):
        train.main(argv)


ENDLESS = ("optim.max_steps=100000", "run.save_every=100000", "run.eval_every=100000")


def train_on_terminal(terminal, argv):
    os.setsid()
    opened = os.open(terminal, os.O_RDWR)  # the first opened terminal controls the session
    for number in (0, 1, 2):
        os.dup2(opened, number)
    with user_errors_as_messages():
        train.main(argv)


def test_closing_the_terminal_stops_and_saves(run):
    """All later writes to the terminal fail, including those of the progress bar."""
    ours, theirs = os.openpty()
    argv = [str(run.config), *ENDLESS, "run.log_every=1"]
    process = start_process(train_on_terminal, os.ttyname(theirs), argv)
    shown = ""
    while not re.search("step (5|[0-9]{2,})/", shown):
        shown += os.read(ours, 4096).decode()
    os.close(theirs)
    os.close(ours)
    process.join(60)
    assert process.exitcode == 0
    (saved,) = checkpoints(run.out_dir)
    assert [*losses(run.out_dir)][-1] == step_of(saved)


QUICK = {("training", 1), ("saving", 0)}


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("phase", "rank"),
    [
        pytest.param(phase, rank, marks=[] if (phase, rank) in QUICK else [pytest.mark.slow])
        for phase in PHASES
        for rank in (0, 1)
        # nothing is saved yet in the first step, and only the main process writes
        if phase != "first step" and (phase, rank) != ("saving", 1)
    ],
)
def test_two_processes_save_when_stopped(run, whole, tmp_path, phase, rank):
    saved = PHASES[phase].saved
    arguments = ([str(run.config), "model.dropout=0"], phase, signal.SIGTERM, rank)
    ends = call_on_two_processes(tmp_path, train_and_stop, *arguments)
    assert [status for status, _ in ends] == [0, 0], ends
    newest = checkpoints(run.out_dir)[-1]
    # all processes see the signal at their second check
    assert saved <= step_of(newest) <= saved + 1 + (phase == "saving")
    assert f"the same command resumes from {newest}\n" in ends[0][1]
    before = losses(run.out_dir)
    ends = call_on_two_processes(tmp_path, train.main, [str(run.config), "model.dropout=0"])
    assert [status for status, _ in ends] == [0, 0], ends
    assert before.items() <= losses(run.out_dir).items()
    assert list(losses(run.out_dir)) == [*range(1, 9)]


# who gets the signal: torchrun; torchrun and its processes, as Slurm sends it; the process group
LAUNCHER, ALL, GROUP = "torchrun", "torchrun and its processes, as Slurm", "all, as a terminal"


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("number", "target"),
    [
        (signal.SIGTERM, LAUNCHER),
        (signal.SIGKILL, LAUNCHER),
        (signal.SIGHUP, LAUNCHER),
        (signal.SIGUSR1, LAUNCHER),
        (signal.SIGTERM, ALL),
        (signal.SIGUSR1, ALL),
        (signal.SIGINT, GROUP),
        (signal.SIGHUP, GROUP),
    ],
)
def test_torchrun_saves_when_stopped(run, number, target):
    """However torchrun is stopped, its processes save, end in seconds, and one reports it."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    handled = ",".join(f"SIG{name}" for name in ("TERM", "INT", "HUP", "QUIT", "USR1"))
    launcher = subprocess.Popen(
        [*command, f"--signals-to-handle={handled}", "train.py", str(run.config), *ENDLESS],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )
    with launcher:
        assert launcher.stdout is not None
        while not re.match("step (5|[0-9]{2,})/", launcher.stdout.readline()):
            assert launcher.poll() is None
        if target == GROUP:
            os.killpg(launcher.pid, number)
        else:
            children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text()
            for pid in (
                [launcher.pid, *map(int, children.split())] if target == ALL else [launcher.pid]
            ):
                os.kill(pid, number)
        said = launcher.stdout.read()  # until all of them have closed the pipe
    newest = checkpoints(run.out_dir)[-1]
    word = WORDS.get(number, "terminated")  # SIGKILL kills the launcher
    assert (launcher.returncode < 0) == (number == signal.SIGKILL)
    assert said.count("the same command resumes from") == 1
    assert f"{word} at step {step_of(newest)}: the same command resumes from {newest}\n" in said
