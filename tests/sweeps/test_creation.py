"""Creating a sweep: what is looked up once for all of its trials."""

import sys

import rollmill
from rollmill.cli.main import _exit_code as command
from rollmill.core import plugins
from rollmill.core.folder import Folder
from rollmill.core.imports import module_of_file
from rollmill.sweeps import creation
from rollmill.sweeps.creation import NewSweep, create_sweep
from rollmill.sweeps.directory import SweepDirectory
from rollmill.sweeps.search_space import listed_axis
from rollmill.training.request import TrainingRequest
from wordings import raises, tells


def test_installed_packages_are_read_once_for_all_trials(tmp_path, monkeypatch):
    read = []
    monkeypatch.setattr(plugins.metadata, "distributions", lambda **_: read.append(1) or [])
    request = TrainingRequest("ppo", "CartPole-v1", {"num_envs": 4, "total_timesteps": 32})
    axes = (listed_axis("learning-rate", [1e-3, 1e-2]), listed_axis("seed", [0, 1, 2]))
    create_sweep(NewSweep(request, axes, directory=tmp_path / "sweep"))
    assert len(read) == 1


def test_a_sweep_is_continued_by_its_own_command(tmp_path, capsys):
    words = ["--over", "seed=0,1", "--resume-if-exists", "--sweep-dir", str(tmp_path / "sweep")]
    assert command(["sweep", "ppo", "CartPole-v1", *words]) == 2
    assert tells("resume-if-exists-applies-to", capsys.readouterr().err)
    with raises("resume-if-exists-applies-to", "rollmill sweep --resume SWEEP"):
        rollmill.sweep("ppo", "CartPole-v1", over={"seed": [0, 1]}, resume_if_exists=True)
    assert not (tmp_path / "sweep").exists()


def test_sweeps_of_one_second_have_directories_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setattr(creation, "_default_directory", lambda asked: tmp_path / "runs/sweep")
    request = TrainingRequest("ppo", "CartPole-v1")
    made = [create_sweep(NewSweep(request, (listed_axis("seed", seeds),))) for seeds in ((0, 1), (2, 3), (4, 5))]
    assert [sweep.root.name for sweep in made] == ["sweep", "sweep-2", "sweep-3"]
    assert [SweepDirectory.open(sweep.root).spec.axes[0].values for sweep in made] == [(0, 1), (2, 3), (4, 5)]


def test_a_directory_in_which_another_process_creates_a_sweep_is_left_alone(tmp_path, monkeypatch):
    asked = NewSweep(
        TrainingRequest("ppo", "CartPole-v1"), (listed_axis("seed", [0, 1]),), directory=tmp_path / "sweep"
    )
    make = Folder.make

    def make_beside_another(folder):
        make(folder)
        if folder.root == asked.directory and not folder.names:
            (folder.root / "trials").mkdir()

    with monkeypatch.context() as changed:
        changed.setattr(Folder, "make", make_beside_another)
        with raises("another-process-is-creating-sweep", str(asked.directory)):
            create_sweep(asked)
    assert not (asked.directory / "sweep.json").exists()


def test_a_sweep_records_the_files_of_modules_that_only_its_trials_import(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "rowing_boats.py").write_text("raise RuntimeError('it was imported')")
    module = module_of_file(str(tmp_path / "rowing_boats.py"))
    request = TrainingRequest("ppo", "Boat-v0", imports=(module,))
    asked = NewSweep(request, (listed_axis("seed", [0, 1]),), directory=tmp_path / "sweep")
    recorded = {module: str(tmp_path.resolve() / "rowing_boats.py")}
    assert SweepDirectory.open(create_sweep(asked).root).spec.import_files == recorded
