"""Helper for programs that get signals."""

import os
import subprocess
import sys
import time


def stopped(program, *signals, **environment):
    """Run a program, send it signals once it is ready, and return its exit status and stderr.

    Besides signals, `signals` may contain a line to wait for on stdout, or seconds to sleep.
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
