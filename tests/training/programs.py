"""Programs that get signals."""

import os
import subprocess
import sys
import time


def stopped(program, *signals, **environment):
    """Exit status and stderr of a program that gets signals once it is ready.

    Between them may stand a line that it is to print first, or seconds to wait.
    """
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, **pipes, env=os.environ | environment) as process:
        assert process.stdout.readline() == "ready\n"
        for step in signals:
            if isinstance(step, str):
                assert process.stdout.readline() == f"{step}\n"
            elif isinstance(step, float):
                time.sleep(step)
            else:
                process.send_signal(step)
        _, said = process.communicate(timeout=60)
        return process.returncode, said
