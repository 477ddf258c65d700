"""Tasks side by side: order, failures, what each may see, and no child that outlives us."""

import os
import re
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from experiments import gpu_pool
from experiments.gpu_pool import Task, groups_of_gpus, run_tasks

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


def test_a_gpu_goes_to_the_next_task_once_it_is_free(task, tmp_path):
    show = "import os, pathlib, time; print(os.environ['CUDA_VISIBLE_DEVICES'])\n"
    last = f"pathlib.Path({str(tmp_path / 'last')!r})"
    wait = (
        f"end = time.time() + 60\nwhile not {last}.exists() and time.time() < end: time.sleep(.01)"
    )
    tasks = [task("a", show + wait), task("b", show), task("c", show)]
    tasks.append(task("d", f"{show}{last}.touch()"))
    assert run_tasks(tasks, [["4", "5"], ["7"]], lambda _: None) == []
    seen = [(tmp_path / f"{name}.log").read_text().strip() for name in "abcd"]
    assert seen == ["4,5", "7", "7", "7"]


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("raise SystemExit(3)", "exit code 3, see {log}"),
        ("import os; os.kill(os.getpid(), 9)", "exit code -9, see {log}"),
        (
            "print('begun'); raise SystemExit('error: step \\r is taken\\n\\n')",
            "exit code 1, see {log}, which ends with: is taken",
        ),
    ],
)
def test_a_command_that_fails_or_is_killed_is_the_last_of_its_task(tmp_path, code, said):
    commands = [[sys.executable, "-c", each] for each in (code, "print('second')")]
    log, lines = tmp_path / "x.log", []
    x = Task(name="x", needs=frozenset(), commands=lambda _: commands, log=log)
    assert run_tasks([x], [[]], lines.append) == ["x"]
    assert lines[-1] == f"x: FAILED: {said.format(log=log)}"
    assert "second" not in log.read_text()


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

    absent = [[str(tmp_path / "none")]]
    tasks = [
        task("fails", "raise SystemExit(3)"),
        task("child", "print(1)", needs=["fails"]),
        task("grandchild", "print(1)", needs=["child"]),
        replace(task("bad", ""), commands=broken),
        replace(task("absent", ""), commands=lambda _: absent),
        task("other", "print('fine')"),
    ]
    said = []
    failed = ["fails", "child", "grandchild", "bad", "absent"]
    assert run_tasks(tasks, [[]], said.append) == failed
    assert (tmp_path / "other.log").read_text() == "fine\n"
    assert any("fails: FAILED: exit code 3, see" in line for line in said)
    assert "bad: FAILED: no steps are left" in said
    assert any(re.fullmatch("absent: FAILED: .*No such file.*none'", line) for line in said), said
    assert not (tmp_path / "child.log").exists()


def test_a_defect_stops_only_its_task_and_is_raised_in_the_end(task, tmp_path):
    def broken(_):
        raise IndexError("a defect")

    said = []
    with pytest.raises(IndexError, match="a defect"):
        run_tasks(
            [replace(task("bad", ""), commands=broken), task("other", "print('fine')")],
            [[]],
            said.append,
        )
    assert (tmp_path / "other.log").read_text() == "fine\n"
    assert "bad: FAILED: IndexError: a defect" in said


def test_groups(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 5)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert groups_of_gpus(2) == [["0", "1"], ["2", "3"]]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,3,4,6,7")
    assert groups_of_gpus(1) == [["1"], ["3"], ["4"], ["6"], ["7"]]
    with pytest.raises(ValueError, match=r"--gpus-per-run=8 must be at most 5"):
        groups_of_gpus(8)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert groups_of_gpus(1) == [[]]
    with pytest.raises(ValueError, match=r"--gpus-per-run=2 must be at most 0"):
        groups_of_gpus(2)


@pytest.fixture(params=STOPPING)
def stopping(request):
    """A signal that stops us: these tests may themselves run under nohup."""
    before = signal.signal(request.param, signal.SIG_DFL)
    yield request.param
    signal.signal(request.param, before)


def test_stopping_us_stops_the_children(task, tmp_path, stopping):
    pid = tmp_path / "pid"
    child = f"""
import os, time
open({str(pid)!r}, "w").write(str(os.getpid()))
os.kill(os.getppid(), {stopping:d})
time.sleep(60)
"""
    begin = time.monotonic()
    with pytest.raises(SystemExit, match=f"^{128 + stopping}$"):
        run_tasks([task("x", child)], [[]], lambda _: None)
    assert time.monotonic() - begin < 30  # of the 60 s that a child left alone would take
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


@pytest.mark.parametrize("when", ["before we know of the child", "after we waited for it"])
def test_no_child_starts_unseen_while_we_are_stopped(tmp_path, monkeypatch, when):
    started, start, children = [], gpu_pool._start, gpu_pool._Children()
    monkeypatch.setattr(gpu_pool, "_Children", lambda: children)

    def stop_us():
        # not to the main thread, whose wait it then does not interrupt
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
        give_up = time.monotonic() + 20
        while not children.stopping and time.monotonic() < give_up:
            time.sleep(0.01)  # while the main thread handles it

    def started_while_we_are_stopped(*arguments):
        child = start(*arguments)
        started.append(child)
        if when.startswith("before"):
            stop_us()
        else:
            wait = child.wait
            monkeypatch.setattr(child, "wait", lambda: (wait(), stop_us())[0])
        return child

    monkeypatch.setattr(gpu_pool, "_start", started_while_we_are_stopped)
    first = "time.sleep(60)" if when.startswith("before") else ""
    commands = [[sys.executable, "-c", f"import time; {code}"] for code in (first, "")]
    x = Task(name="x", needs=frozenset(), commands=lambda _: commands, log=tmp_path / "x.log")
    begin = time.monotonic()
    with pytest.raises(SystemExit, match=f"^{128 + signal.SIGTERM}$"):
        run_tasks([x], [[]], lambda _: None)
    assert len(started) == 1
    assert time.monotonic() - begin < 30  # of the 60 s that a child left alone would take
