"""A Slurm of this machine alone, for root, in a folder of its own: no systemd, no munge, no files elsewhere."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
import os
from pathlib import Path
import shutil
import signal
import socket
import subprocess
import time

from jobs.launch import stop
from pce_mpi.jobs.mpiexec import number_of_cores
from pce_mpi.jobs.patience import Patience

PROGRAMS = ("slurmctld", "slurmd", "srun", "sinfo")

# Far more seconds than the daemons take to start on a busy machine, and less than a test may take.
PATIENCE = 90


def missing() -> str:
    """Return the reason why this machine cannot run it, '' if it can."""
    if absent := [name for name in PROGRAMS if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None]:
        return f"there is no {' and no '.join(absent)}: runs as root where Slurm is installed (Debian: slurm-wlm)"
    return "" if os.getuid() == 0 else "Slurm's daemons are started by root alone: runs as root"


@contextmanager
def one_node_slurm(folder: Path) -> Iterator[dict[str, str]]:
    """Start the daemons and give the environment in which `srun` finds them; afterwards no process is left."""
    configuration = folder / "slurm.conf"
    configuration.write_text(configured(folder))
    of_others = ("SLURM_", "PMI_", "PMIX_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(of_others)}
    environment |= {"SLURM_CONF": str(configuration), "PATH": f"{os.environ['PATH']}:/usr/sbin"}
    daemons = {"slurmctld": ["-D", "-c"], "slurmd": ["-D"]}
    processes = []
    try:
        for name, options in daemons.items():
            with open(folder / f"{name}.log", "wb") as log:
                command = [shutil.which(name, path=environment["PATH"]) or name, *options]
                process = subprocess.Popen(
                    command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
                )
            processes.append(process)
        patience = Patience(PATIENCE)
        while node_state(environment) != "idle":
            if patience.is_over() or any(process.poll() is not None for process in processes):
                logs = "\n".join((folder / f"{name}.log").read_text(errors="replace")[-2000:] for name in daemons)
                raise RuntimeError(f"Slurm did not start on this machine:\n{logs}")
            time.sleep(0.1)
        yield environment
    finally:
        end(processes, str(configuration))


def configured(folder: Path) -> str:
    host = socket.gethostname().partition(".")[0]
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        ports = one.getsockname()[1], other.getsockname()[1]
    for name in ("state", "spool"):
        (folder / name).mkdir()
    settings = {
        "ClusterName": "one",
        "SlurmctldHost": f"{host}(127.0.0.1)",
        "SlurmUser": "root",
        "AuthType": "auth/none",
        "CredType": "cred/none",
        "ProctrackType": "proctrack/linuxproc",
        "TaskPlugin": "task/none",
        "SlurmctldPort": ports[0],
        "SlurmdPort": ports[1],
        "StateSaveLocation": folder / "state",
        "SlurmdSpoolDir": folder / "spool",
        "SlurmctldPidFile": folder / "slurmctld.pid",
        "SlurmdPidFile": folder / "slurmd.pid",
        # MPICH names the memory that ranks share after the job, and killed ones leave it behind: no number comes again.
        "FirstJobId": int(time.time()) % 60_000_000 + 1,
    }
    lines = [f"{name}={value}" for name, value in settings.items()]
    lines.append(f"NodeName={host} NodeAddr=127.0.0.1 CPUs={number_of_cores()}")
    lines.append("PartitionName=all Nodes=ALL Default=YES")
    return "\n".join(lines) + "\n"


def node_state(environment: dict[str, str]) -> str:
    """The state of the node in a word, '' while the controller does not answer."""
    asked = subprocess.run(["sinfo", "--noheader", "--format=%t"], env=environment, capture_output=True, text=True)
    return asked.stdout.strip()


def end(daemons: list[subprocess.Popen[bytes]], configuration: str) -> None:
    """End the daemons, then what they have started: a step that is not over would try to tell them so for long."""
    for daemon in reversed(daemons):
        stop(daemon)
    for pid in processes_with(configuration):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def processes_with(configuration: str) -> set[int]:
    """The processes in whose environment this file is Slurm's configuration."""
    wanted, found = f"SLURM_CONF={configuration}\0".encode(), set()
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if wanted in path.read_bytes():
                found.add(int(path.parent.name))
    return found
