"""Run a launcher, and end all that it has started: `guard.py COMMAND...`, with a pipe on standard input.

The process that holds the other end of the pipe ends the job by closing it, or by ending itself, in whatever way: even
SIGKILL closes its end. On Linux, processes whose parent has gone become children of this one
(PR_SET_CHILD_SUBREAPER), so that no session, process group or daemon is out of its reach; elsewhere it ends the
launcher's process group. The launcher has to end what it started on other hosts, and srun what Slurm started for it.

This process ends only after all those, with the launcher's exit status. It is started as a file, not as a module, so
that it needs nothing but the standard library, and imports little of that.
"""

import contextlib
import ctypes
import os
from pathlib import Path
import signal
import sys
import threading
import time
from typing import NoReturn

# Seconds that a launcher may take to end its ranks after SIGTERM.
GRACE = 3.0

# Constants of linux/prctl.h.
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def end_with_parent(number: signal.Signals) -> None:
    """Have the kernel send this process `number` when its parent ends; nothing but on Linux."""
    _set_option(_PR_SET_PDEATHSIG, number)


def _set_option(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _main(command: list[str]) -> NoReturn:
    """Run `command` until it has ended or nobody holds the pipe any more, and end all that is left of it."""
    _set_option(_PR_SET_CHILD_SUBREAPER, 1)
    launcher = os.fork()
    if launcher == 0:
        _become(command)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # one that ranks or a launcher send to all they find
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_without_reader, args=(launcher,), daemon=True).start()
    ended, status = os.wait()
    while ended != launcher:
        ended, status = os.wait()
    _end(launcher)
    status = os.waitstatus_to_exitcode(status)
    # A signal becomes a shell's exit status for it.
    os._exit(status if status >= 0 else 128 - status)


def _become(command: list[str]) -> NoReturn:
    end_with_parent(signal.SIGTERM)
    os.setpgid(0, 0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, os.fsencode(f"{command[0]} could not be started: {error.strerror}\n"))
        os._exit(127)


def _end_without_reader(launcher: int) -> None:
    """Wait for the end of the pipe, and end the launcher, which ends its ranks on SIGTERM and may not on SIGKILL."""
    os.read(0, 1)
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(launcher, number)
        time.sleep(GRACE)


def _end(group: int) -> None:
    """End all processes of the group, and all descendants of this process."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)
    while children := descendants(os.getpid()):
        for pid in children:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(children[0], 0)
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def descendants(pid: int) -> list[int]:
    """Return the children of a process, their children, and so on; none where there is no /proc."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            # The name, in brackets, may have spaces of its own; the state and the parent follow it.
            parent = int(path.read_bytes().rpartition(b")")[2].split()[1])
            children.setdefault(parent, []).append(int(path.parent.name))
    found = children.get(pid, [])
    for child in found:  # grows on the way
        found += children.get(child, [])
    return found


if __name__ == "__main__":
    _main(sys.argv[1:])
