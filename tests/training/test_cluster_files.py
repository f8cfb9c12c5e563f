"""The files of examples/cluster: against stand-ins, and under a real slurmd where there is one."""

import contextlib
import os
import shlex
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from rollmill.cli.requests import parse_training

FILES = Path(__file__).parents[2] / "examples" / "cluster"
SCRIPT = FILES / "train.sbatch"
SMALL = "ppo CartPole-v1 --num-envs 4 --num-steps 4 --num-minibatches 1 --network.hidden-sizes 8 --fusion off"
DAEMONS = ("munged", "slurmctld", "slurmd")
CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
NodeName={host} NodeAddr=127.0.0.1 CPUs={cores} State=UNKNOWN
PartitionName=main Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""


def train_command(line):
    """Returns the words after `rollmill train` in a command, with their options read."""
    words = shlex.split(line.replace("$RUN_DIR", "s3://bucket/runs/cartpole"))
    return parse_training(words[words.index("train") + 1 :])


def test_the_rayjob_trains_in_the_store_and_waits_for_its_queue():
    job = yaml.safe_load((FILES / "rayjob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] and job["spec"]["suspend"] is True
    settings = train_command(job["spec"]["entrypoint"]).request.settings
    assert settings["cluster"] == "auto" and settings["resume_if_exists"] is True
    cluster = job["spec"]["rayClusterSpec"]
    workers = cluster["workerGroupSpecs"][0]
    for group in (cluster["headGroupSpec"], workers):
        (container,) = group["template"]["spec"]["containers"]
        assert container["image"] == "rollmill" and container["resources"]["limits"]["cpu"] == "2"
    assert settings["actors"] + 1 <= 2 * (1 + workers["replicas"])  # CPUs of the cluster


def test_the_task_of_skypilot_goes_on_after_a_preemption():
    task = yaml.safe_load((FILES / "skypilot.yaml").read_text())
    assert task["resources"]["use_spot"] is True and "store" in task["setup"]
    settings = train_command(task["run"].strip().splitlines()[-1]).request.settings
    assert settings["resume_if_exists"] is True


@pytest.mark.parametrize(("code", "requeued"), [(0, False), (140, True), (2, False), (143, False)])
def test_the_script_of_slurm_requeues_after_its_notice_alone(tmp_path, code, requeued):
    """Under stand-ins for srun and scontrol."""
    seen = f'echo "$SRUN_CPUS_PER_TASK $VIRTUAL_ENV $PYTHONPATH" > {tmp_path}/seen'
    said = {
        "srun": f'echo "$@" > {tmp_path}/command; {seen}; exit {code}',
        "scontrol": f'echo "$@" > {tmp_path}/asked',
    }
    for name, text in said.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    venv = tmp_path / ".venv" / "bin" / "activate"
    venv.parent.mkdir(parents=True)
    venv.write_text("export VIRTUAL_ENV=$PWD/.venv\n")
    job = {"SLURM_JOB_ID": "7", "SLURM_CPUS_PER_TASK": "8", "PYTHONPATH": "/mine"}
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", **job}
    done = subprocess.run(["bash", SCRIPT, "ppo", "CartPole-v1"], env=environment, check=False, cwd=tmp_path)
    assert done.returncode == code
    command = (tmp_path / "command").read_text().strip()
    assert command == "rollmill train ppo CartPole-v1 --run-dir runs/7 --resume-if-exists"
    assert train_command(command).request.settings["run_dir"] == "runs/7"
    assert (tmp_path / "seen").read_text() == f"8 {tmp_path}/.venv {tmp_path}:/mine\n"
    assert (tmp_path / "asked").exists() == requeued
    if requeued:
        assert (tmp_path / "asked").read_text() == "requeue 7\n"


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """A cluster of this machine: a controller and one node."""
    if os.geteuid() != 0 or any(shutil.which(name) is None for name in DAEMONS):
        pytest.skip("needs root, and slurm-wlm and munge of Debian")
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2)]
        ports = [each.getsockname()[1] for each in sockets]
    for name in ("state", "spool"):
        (tmp_path / name).mkdir()
    file = tmp_path / "slurm.conf"
    host, cores = socket.gethostname(), os.cpu_count()
    file.write_text(CONFIG.format(folder=tmp_path, host=host, ports=ports, cores=cores))
    monkeypatch.setenv("SLURM_CONF", str(file))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    Path("/run/munge").mkdir(exist_ok=True)
    shutil.chown("/run/munge", "munge", "munge")
    started = subprocess.run(["runuser", "-u", "munge", "--", "munged"], check=False, capture_output=True)
    for name in DAEMONS[1:]:
        subprocess.run([name, "-f", file], check=True)
    yield tmp_path
    for name in reversed(DAEMONS[1:]):
        subprocess.run(["kill", (tmp_path / f"{name}.pid").read_text().strip()], check=False)
    if started.returncode == 0:
        subprocess.run(["runuser", "-u", "munge", "--", "munged", "--stop"], check=False)


def wait_until(condition, seconds=400):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)


@pytest.mark.slow
def test_a_job_of_slurm_goes_on_after_each_requeue(slurm):
    """Under a real slurmd: SIGUSR1 saves, SIGUSR2 requeues, and so twice; then the job finishes."""

    def asked(*words):
        return subprocess.run(words, check=True, capture_output=True, text=True, cwd=slurm).stdout.strip()

    sizes = "--total-timesteps 400_000 --log-every 1 --no-tensorboard --checkpoint-seconds 1000"
    job = asked("sbatch", "--parsable", "--cpus-per-task=1", str(SCRIPT), *shlex.split(f"{SMALL} {sizes}"))
    run, output = slurm / "runs" / job, slurm / f"slurm-{job}.out"
    lines = lambda: (run / "metrics.jsonl").read_text().count("\n") if (run / "metrics.jsonl").exists() else 0
    for restarts in (1, 2):
        before = lines()
        wait_until(lambda before=before: lines() > before + 10)
        asked("scancel", "--signal=USR1", job)
        wait_until(lambda restarts=restarts: output.read_text().count("SIGUSR1: saving") == restarts)
        asked("scancel", "--signal=USR2", job)
        wait_until(lambda restarts=restarts: f"Restarts={restarts}" in asked("scontrol", "show", "job", job))
        assert output.read_text().count("stopped by SIGUSR2") == restarts
        time.sleep(2)  # slurmd refuses a job that starts again in the second in which it was revoked
        asked("scontrol", "update", f"JobId={job}", "StartTime=now")
    wait_until(lambda: "JobState=COMPLETED" in asked("scontrol", "show", "job", job))
    assert output.read_text().count("resumed from iteration") == 2
    assert lines() == 400_000 // 16
