"""Process groups: a process can always leave its group and exit."""

import sys
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.training_runs import call_on_two_processes
from training.distributed import start_processes


def leave_with_an_operation_in_flight():
    sys.setswitchinterval(100)  # Gloo's threads get the GIL only if this thread releases it
    with start_processes("cpu") as processes:
        model = DistributedDataParallel(nn.Linear(1, 1))
        if processes.is_main:
            time.sleep(0.5)
        dist.all_reduce(torch.ones(1), async_op=True)  # a thread of Gloo frees the tensor
        processes.leave()
        del model


@pytest.mark.distributed
def test_leaving_does_not_wait_for_threads_that_need_the_gil(tmp_path):
    ends = call_on_two_processes(tmp_path, leave_with_an_operation_in_flight)
    assert [status for status, _ in ends] == [0, 0], ends
