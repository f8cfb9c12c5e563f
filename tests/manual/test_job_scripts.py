"""Scripts for batch systems in the manual: the files that pages show, and what they run."""

import os
import re
import subprocess

import pytest

from manual.snippets import ROOT

CLUSTER = (ROOT / "docs/cluster.md").read_text()
ANSWERS = (ROOT / "docs/how-do-i.md").read_text()
SRUN = """#!/bin/sh
echo "$@" >> calls
echo "$PYTHONPATH $SRUN_CPUS_PER_TASK $ACTIVATED" >> calls
exit ${CODE:-0}
"""


def titled(page, title):
    """The text of the block with a title."""
    (text,) = re.findall(rf'^```\w+ title="{re.escape(title)}"\n(.*?)^```$', page, re.M | re.S)
    return text


@pytest.mark.parametrize("name", ["train.sbatch", "rayjob.yaml", "skypilot.yaml"])
def test_the_page_on_clusters_shows_the_files_as_they_are(name):
    assert titled(CLUSTER, name) == (ROOT / "examples/cluster" / name).read_text()
    assert "--8<--" not in CLUSTER


@pytest.mark.parametrize(
    ("title", "more", "run_dir", "job"),
    [
        ("job.sh", {}, "runs/7", "7"),
        ("array.sh", {"SLURM_ARRAY_JOB_ID": "6", "SLURM_ARRAY_TASK_ID": "3"}, "runs/6-3", "6_3"),
    ],
)
@pytest.mark.parametrize("code", [0, 1, 140])
def test_a_job_finds_its_environment_and_requeues_itself_when_time_is_over(
    tmp_path, title, more, run_dir, job, code
):
    for name, text in {"srun": SRUN, "scontrol": '#!/bin/sh\necho "scontrol $@" >> calls\n'}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/activate").write_text("export ACTIVATED=yes\n")
    (tmp_path / title).write_text(titled(ANSWERS, title))
    env = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "CODE": str(code)}
    env |= {"SLURM_JOB_ID": "7", "SLURM_CPUS_PER_TASK": "8", **more}
    done = subprocess.run(["bash", title], cwd=tmp_path, env=env, check=False)
    assert done.returncode == code
    trained, seen, *requeued = (tmp_path / "calls").read_text().splitlines()
    assert trained.startswith("rollmill train ppo CartPole-v1") and f"--run-dir {run_dir} --resume" in trained
    assert ("--seed 3 " in trained) == ("SLURM_ARRAY_TASK_ID" in more)
    assert seen == f"{tmp_path} 8 yes"
    assert requeued == ([f"scontrol requeue {job}"] if code == 140 else [])
    assert "#SBATCH --ntasks=1 --cpus-per-task=8" in (tmp_path / title).read_text()
