"""A SLURM of one node on this machine, all of it in one folder: munged, slurmctld,
slurmd, and nothing under /etc.

As a script it runs a command inside such a cluster: `python tests/support/slurm_cluster.py
sinfo`.
"""

import contextlib
import getpass
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

PACKAGES = "slurmctld slurmd slurm-client munge"
_COMMANDS = ("munged", "slurmctld", "slurmd", "sbatch", "setpriv")
# Any user can run it, and the jobs are this user's. CPUs: two jobs run at once,
# whatever the machine has. KillWait: what outlives SIGTERM gets SIGKILL a second later,
# or at SLURM's next look round. cred_expire: a requeued job waits this long before it
# runs again; less than 5 s is taken for 120 s.
_CONFIGURATION = """\
ClusterName=local
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
MailProg=/bin/true
KillWait=1
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,batch_sched_delay=0
NodeName=node NodeHostname={host} NodeAddr=127.0.0.1 CPUs=2 RealMemory=4000
PartitionName=local Nodes=node Default=YES State=UP
"""
# Accounting needs a database server: this answers in its place, from what the
# controller remembers (300 s).
_SACCT = """\
#!/bin/sh
echo 'JobID|State|NodeList'
exec squeue --noheader --array --states=all --format='%i|%T|%N'
"""


def why_not() -> str | None:
    """Why there can be no SLURM here, in one line; None if there can be one."""
    absent = [name for name in _COMMANDS if shutil.which(name, path=_path()) is None]
    return (
        f"no SLURM here: wanted {', '.join(absent)}; Debian has them in {PACKAGES}"
        if absent
        else None
    )


@contextlib.contextmanager
def local_slurm(folder: Path, timeout: float = 20.0) -> Iterator[None]:
    """Within the block SLURM's commands reach a partition "local" whose one node is
    this machine.

    Raises:
        OSError: SLURM cannot be had here (`why_not`), or its node is not idle after
            `timeout` seconds.
    """
    if reason := why_not():
        raise OSError(reason)
    folder = folder.absolute()
    _write_files(folder)
    munge_files = {
        "socket": "munge.socket",
        "key-file": "munge.key",
        "pid-file": "munge.pid",
        "seed-file": "munge.seed",
    }
    deadline = time.monotonic() + timeout
    with contextlib.ExitStack() as stack:
        stack.enter_context(
            _environment(
                SLURM_CONF=f"{folder}/slurm.conf", PATH=f"{folder}/bin:{_path()}"
            )
        )
        # --force: it refuses a socket in a folder that others may not enter.
        options = [
            f"--{option}={folder / name}" for option, name in munge_files.items()
        ]
        munged = stack.enter_context(
            _daemon(folder, "munged", "--foreground", "--force", *options)
        )
        _wait(munged, deadline, lambda: (folder / "munge.socket").exists())
        slurmctld = stack.enter_context(_daemon(folder, "slurmctld", "-D"))
        stack.enter_context(_daemon(folder, "slurmd", "-D", "-N", "node"))
        _wait(
            slurmctld,
            deadline,
            lambda: _answer("sinfo", "--noheader", "--format=%T") == "idle",
        )
        stack.callback(_end_jobs)
        yield


def _path() -> str:
    """Daemons live in /usr/sbin, which users who are not root need not have in their
    PATH.
    """
    return f"{os.environ['PATH']}:/usr/sbin"


def _write_files(folder: Path) -> None:
    for name in ("state", "spool", "bin"):
        (folder / name).mkdir(parents=True)
    # Both at once, so that the ports differ.
    with (
        socket.create_server(("127.0.0.1", 0)) as one,
        socket.create_server(("127.0.0.1", 0)) as other,
    ):
        ports = [s.getsockname()[1] for s in (one, other)]
    host = socket.gethostname().split(".")[0]
    (folder / "slurm.conf").write_text(
        _CONFIGURATION.format(
            folder=folder, host=host, ports=ports, user=getpass.getuser()
        )
    )
    (folder / "munge.key").write_bytes(os.urandom(1024))
    (folder / "munge.key").chmod(0o400)
    (folder / "bin" / "sacct").write_text(_SACCT)
    (folder / "bin" / "sacct").chmod(0o755)


@contextlib.contextmanager
def _environment(**variables: str) -> Iterator[None]:
    outside = {name: os.environ.get(name) for name in variables}
    os.environ |= variables
    try:
        yield
    finally:
        for name, value in outside.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _daemon(
    folder: Path, name: str, *arguments: str
) -> Iterator["subprocess.Popen[bytes]"]:
    with (folder / f"{name}.log").open("wb") as log:
        # It ends with this process, however that ends, but not by Ctrl-C, which must
        # end its jobs first.
        command = ["setpriv", "--pdeathsig", "TERM", name, *arguments]
        process = subprocess.Popen(
            command, stdout=log, stderr=log, start_new_session=True
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait(
    process: "subprocess.Popen[bytes]", deadline: float, ready: Callable[[], bool]
) -> None:
    while not ready():
        if process.poll() is not None or time.monotonic() > deadline:
            raise OSError(
                f"no SLURM: wanted it up in time, got none; see the logs "
                f"beside {os.environ['SLURM_CONF']}"
            )
        time.sleep(0.05)


def _end_jobs() -> None:
    """End every job: without the daemons nothing else would."""
    _answer("scancel", f"--user={getpass.getuser()}")
    deadline = time.monotonic() + 10
    while _answer("squeue", "--noheader") and time.monotonic() < deadline:
        time.sleep(0.1)


def _answer(*command: str) -> str:
    return subprocess.run(
        command, capture_output=True, text=True, timeout=30
    ).stdout.strip()


if __name__ == "__main__":
    with (
        tempfile.TemporaryDirectory(prefix="slurm_") as scratch,
        local_slurm(Path(scratch)),
    ):
        status = subprocess.run(sys.argv[1:]).returncode
    sys.exit(status)
