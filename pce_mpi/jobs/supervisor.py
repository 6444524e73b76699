"""Run one rank's worker as a child process and record its exit status: `supervisor.py FILE COMMAND...`.

Launchers end all ranks when one dies, and do not reliably report which one was the first, nor why. This process ends
only after it has recorded that, so the first line of FILE, "pid status", is the rank that failed first. It is started
as a file, not as a module, and imports little, because there is one for each rank.
"""

import os
import sys


def main(file: str, command: list[str]) -> None:
    """Run `command`, append a line to `file` when it has ended, and exit in the same way."""
    worker = os.spawnv(os.P_NOWAIT, command[0], command)
    status = os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1])
    log = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(log, f"{worker} {status}\n".encode())
    # A signal becomes a shell's exit status for it, which any launcher takes for a failure.
    os._exit(status if status >= 0 else 128 - status)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
