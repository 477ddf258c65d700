"""Process groups that run functions for tests: started once, for many calls."""

import multiprocessing
import pickle
import traceback
from multiprocessing.connection import wait
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist

from experiments.reliability.processes import start_process
from kernels import ContextGroup
from tests.interpreter import speed_up_interpreter


class Processes:
    """A process group, with a GPU for each process if on GPUs. A failed call ends all processes."""

    def __init__(self, size, *, on_gpus=False):
        self.size, self._on_gpus = size, on_gpus
        self._started = {}  # pipe -> process

    def call(self, function, *arguments):
        """Run function(context, *arguments) in each process, and return the results by rank."""
        if not self._started:
            self._start()
        for pipe in self._started:
            pipe.send_bytes(pickle.dumps((function, arguments)))
        answers, waiting = {}, list(self._started)
        while waiting:
            ready = wait(waiting, timeout=300)
            assert ready, self._give_up("no answer in 300 s")
            for pipe in ready:
                try:
                    error, answers[pipe] = pickle.loads(pipe.recv_bytes())
                except EOFError:
                    error = "a process ended without an answer"
                assert not error, self._give_up(error)
                waiting.remove(pipe)
        return [answers[pipe] for pipe in self._started]

    def _start(self):
        self._folder = TemporaryDirectory()
        for rank in range(self.size):
            ours, theirs = multiprocessing.Pipe()
            store = str(Path(self._folder.name) / "store")
            process = start_process(_serve, rank, self.size, store, self._on_gpus, theirs)
            theirs.close()
            self._started[ours] = process

    def _give_up(self, reason):
        self.close()
        return reason

    def close(self):
        for process in self._started.values():
            process.kill()  # it may be waiting for one that failed
            process.join()
        if self._started:
            self._folder.cleanup()
        self._started = {}


def _serve(rank, size, store, on_gpus, pipe):
    torch.set_num_threads(1)
    if on_gpus:
        torch.cuda.set_device(rank)
    else:
        speed_up_interpreter()
    dist.init_process_group(
        "nccl" if on_gpus else "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=size,
        device_id=torch.device("cuda", rank) if on_gpus else None,
    )
    context = ContextGroup(dist.group.WORLD)
    while True:
        function, arguments = pickle.loads(pipe.recv_bytes())
        try:
            answer = ("", function(context, *arguments))
        except BaseException:  # noqa: BLE001  # fails the test, not this process
            answer = (f"rank {rank}: {traceback.format_exc()}", None)
        pipe.send_bytes(pickle.dumps(answer))
