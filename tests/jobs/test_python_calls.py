"""benchmarks/python_calls.py: a small loss and a training step enter few Python functions."""

import re

from jobs.launch import launch

# A number that falls belongs here; one that rises needs a reason. Later versions of Python enter fewer.
MOST = {"softmax_cross_entropy": 92, "x @ w": 35, "cross_entropy on the tape": 152, "backward": 85, "SGD.step": 40}


def test_loss_and_step_enter_few_python_functions():
    done = launch(2, "benchmarks/python_calls.py")
    assert done.returncode == 0, done.stderr
    found = {name: int(calls) for name, calls in re.findall(r"^(\S.*?) +(\d+) +\d+$", done.stdout, re.MULTILINE)}
    assert found.keys() == MOST.keys()
    assert {name: calls for name, calls in found.items() if calls > MOST[name]} == {}
