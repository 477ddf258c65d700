"""Tasks side by side: order, failures, what each may see, and no child that outlives us."""

import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from experiments import gpu_pool
from experiments.gpu_pool import Task, groups_of_gpus, python_command, run_tasks

STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@pytest.fixture
def task(tmp_path):
    def make(name, code, needs=()):
        return Task(
            name=name,
            needs=frozenset(needs),
            commands=lambda n_gpu: [[sys.executable, "-c", code.format(n_gpu=n_gpu)]],
            log=tmp_path / f"{name}.log",
        )

    return make


def test_runs_all_and_waits_for_what_is_needed(task, tmp_path):
    write = f"import pathlib; pathlib.Path({str(tmp_path)!r}, 'a').write_text('x')"
    read = f"print(open({str(tmp_path / 'a')!r}).read(), {{n_gpu}})"
    said = []
    tasks = [task("second", read, needs=["first"]), task("first", write)]
    assert run_tasks(tasks, [["0"], ["1", "2"]], said.append) == []
    assert (tmp_path / "second.log").read_text() == "x 2\n"
    assert said[0].startswith("first: started on GPU 0")
    assert said[-1] == "second: done"


def test_each_sees_its_own_gpus(task, tmp_path):
    show = "import os, time; time.sleep(.3); print(os.environ['CUDA_VISIBLE_DEVICES'])"
    tasks = [task(name, show) for name in "abc"]
    assert run_tasks(tasks, [["4", "5"], ["7"]], lambda _: None) == []
    seen = [(tmp_path / f"{name}.log").read_text().strip() for name in "abc"]
    assert seen[:2] == ["4,5", "7"] and seen[2] in ("4,5", "7")


def test_earlier_tasks_start_first(task):
    said = []
    tasks = [task(name, "") for name in "cab"]
    assert run_tasks(tasks, [[]], said.append) == []
    assert [line.partition(":")[0] for line in said if "started" in line] == ["c", "a", "b"]


def test_a_gpu_goes_to_the_next_task_once_it_is_free(task, tmp_path):
    show = "import os, pathlib, time; print(os.environ['CUDA_VISIBLE_DEVICES'])\n"
    last = f"pathlib.Path({str(tmp_path / 'last')!r})"
    wait = (
        f"end = time.time() + 60\nwhile not {last}.exists() and time.time() < end: time.sleep(.01)"
    )
    tasks = [task("a", show + wait), task("b", show), task("c", show)]
    tasks.append(task("d", f"{show}{last}.touch()"))
    assert run_tasks(tasks, [["4"], ["7"]], lambda _: None) == []
    seen = [(tmp_path / f"{name}.log").read_text().strip() for name in "abcd"]
    assert seen == ["4", "7", "7", "7"]


def test_the_last_line_of_a_failed_task_is_told(task, tmp_path):
    said = []
    code = "print('begun'); raise SystemExit('error: step \\r is taken\\n\\n')"
    assert run_tasks([task("x", code)], [[]], said.append) == ["x"]
    log = tmp_path / "x.log"
    assert said[-1] == f"x: FAILED: exit code 1, see {log}, which ends with: is taken"


def test_a_command_that_fails_or_is_killed_is_the_last_of_its_task(tmp_path):
    killed = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    log = tmp_path / "x.log"
    for code, end in (("raise SystemExit(3)", 3), (killed, -signal.SIGKILL)):
        commands = [[sys.executable, "-c", each] for each in (code, "print('went on')")]
        said = []
        x = Task(name="x", needs=frozenset(), commands=lambda _, lines=commands: lines, log=log)
        assert run_tasks([x], [[]], said.append) == ["x"]
        assert said[-1] == f"x: FAILED: exit code {end}, see {log}"
        assert "went on" not in log.read_text()


def test_logs_of_earlier_attempts_stay(task, tmp_path):
    for word in ("once", "again"):
        assert run_tasks([task("x", f"print('{word}')")], [[]], lambda _: None) == []
    assert (tmp_path / "x.log").read_text() == "once\nagain\n"


def test_signals_are_handled_as_before_in_the_end(task):
    before = [signal.getsignal(number) for number in STOPPING]
    run_tasks([task("x", "")], [[]], lambda _: None)
    assert [signal.getsignal(number) for number in STOPPING] == before
    with ThreadPoolExecutor(1) as threads:  # signals are the main thread's
        assert threads.submit(run_tasks, [task("y", "")], [[]], lambda _: None).result() == []


def test_failure_stops_only_what_needs_it(task, tmp_path):
    def broken(_):
        raise ValueError("no steps are left")

    bad = Task(name="bad", needs=frozenset(), commands=broken, log=tmp_path / "bad.log")
    tasks = [
        task("fails", "raise SystemExit(3)"),
        task("child", "print(1)", needs=["fails"]),
        task("grandchild", "print(1)", needs=["child"]),
        bad,
        task("other", "print('fine')"),
    ]
    said = []
    assert run_tasks(tasks, [[]], said.append) == ["fails", "child", "grandchild", "bad"]
    assert (tmp_path / "other.log").read_text() == "fine\n"
    assert any("fails: FAILED: exit code 3, see" in line for line in said)
    assert "bad: FAILED: no steps are left" in said
    assert not (tmp_path / "child.log").exists()


def test_a_defect_stops_only_its_task_and_is_raised_in_the_end(task, tmp_path):
    def broken(_):
        raise IndexError("a defect")

    bad = Task(name="bad", needs=frozenset(), commands=broken, log=tmp_path / "bad.log")
    said = []
    with pytest.raises(IndexError, match="a defect"):
        run_tasks([bad, task("other", "print('fine')")], [[]], said.append)
    assert (tmp_path / "other.log").read_text() == "fine\n"
    assert "bad: FAILED: IndexError: a defect" in said


def test_groups(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 5)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert groups_of_gpus(2) == [["0", "1"], ["2", "3"]]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,3,4,6,7")
    assert groups_of_gpus(1) == [["1"], ["3"], ["4"], ["6"], ["7"]]
    with pytest.raises(ValueError, match=r"--gpus-per-run=8, and there are 5 GPU"):
        groups_of_gpus(8)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert groups_of_gpus(1) == [[]]
    with pytest.raises(ValueError, match=r"--gpus-per-run=2, and there are 0 GPU"):
        groups_of_gpus(2)


def test_torchrun_for_several_gpus():
    assert python_command(1, "train.py", "a")[1:] == ["train.py", "a"]
    assert python_command(0, "train.py", "a")[1:] == ["train.py", "a"]
    assert python_command(4, "-m", "scripts.x")[2:] == [
        "torch.distributed.run", "--standalone", "--nproc_per_node=4", "-m", "scripts.x",
    ]  # fmt: skip


@pytest.mark.parametrize("number", STOPPING)
def test_stopping_us_stops_the_children(tmp_path, number):
    pid = tmp_path / "pid"
    child = f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    program = f"""
import signal, sys
from pathlib import Path
from experiments.gpu_pool import Task, run_tasks
signal.signal({number:d}, signal.SIG_DFL)  # these tests may themselves run under nohup
command = [sys.executable, "-c", {child!r}]
run_tasks([Task(name="x", needs=frozenset(), commands=lambda n: [command],
                log=Path({str(tmp_path / "x.log")!r}))], [[]])
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program], cwd=gpu_pool.__file__[: -len("experiments/gpu_pool.py")]
    )
    deadline = time.monotonic() + 60
    while not (pid.exists() and pid.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(number)
    assert process.wait(timeout=30) == 128 + number
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


def test_a_lost_terminal_stops_nothing_under_nohup(task, tmp_path):
    hang_up = "import os, signal; os.kill(os.getppid(), signal.SIGHUP); print('fine')"
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert run_tasks([task("x", hang_up)], [[]], lambda _: None) == []
    finally:
        signal.signal(signal.SIGHUP, before)
    assert (tmp_path / "x.log").read_text() == "fine\n"


# A signal before the pool knows of a child that it starts, and one after the last it waited for
BETWEEN = """
def start(*arguments):
    child = real(*arguments)
    stop_us()
    return child
"""
AFTER = """
def start(*arguments):
    child = real(*arguments)
    wait = child.wait
    child.wait = lambda: (wait(), stop_us())[0]
    return child
"""


@pytest.mark.parametrize(
    ("start", "first"), [(BETWEEN, "time.sleep(60)"), (AFTER, "")], ids=["between", "after"]
)
def test_no_child_starts_unseen_while_we_are_stopped(tmp_path, start, first):
    program = f"""
import os, signal, sys, time
from pathlib import Path
from experiments import gpu_pool
real = gpu_pool._start
def stop_us():
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.5)  # while the main thread handles it
{start}
def counted(*arguments):
    print("started", flush=True)
    return start(*arguments)
gpu_pool._start = counted
codes = [{first!r}, "time.sleep(60)"]
commands = [[sys.executable, "-c", "import time; " + code] for code in codes]
gpu_pool.run_tasks([gpu_pool.Task(name="x", needs=frozenset(), commands=lambda n: commands,
                    log=Path({str(tmp_path / "x.log")!r}))], [[]], lambda _: None)
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=gpu_pool.__file__[: -len("experiments/gpu_pool.py")],
        stdout=subprocess.PIPE,
        timeout=30,  # of the 60 s that a child left alone would take
        text=True,
    )
    assert done.returncode == 128 + signal.SIGTERM
    assert done.stdout.count("started") == 1


def test_command_that_cannot_start_fails_its_task_alone(task, tmp_path):
    absent = Task(
        name="absent",
        needs=frozenset(),
        commands=lambda _: [[str(tmp_path / "none")]],
        log=tmp_path / "absent.log",
    )
    said = []
    assert run_tasks([absent, task("other", "print('fine')")], [[]], said.append) == ["absent"]
    assert (tmp_path / "other.log").read_text() == "fine\n"
    assert any(re.fullmatch("absent: FAILED: .*No such file.*none'", line) for line in said), said


def test_what_is_needed_must_be_there(task):
    with pytest.raises(AssertionError, match="must be among the tasks"):
        run_tasks([task("child", "print(1)", needs=["absent"])], [[]], lambda _: None)
