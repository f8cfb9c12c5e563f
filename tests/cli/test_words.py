"""Words of a command mean what their place says, not what they look like."""

import contextlib
import json
from pathlib import Path

import pytest

import rollmill
from rollmill.cli import plan_search_options as searching, requests, resume
from rollmill.cli.main import main
from rollmill.cli.requests import parse_training
from rollmill.core.errors import UsageError
from rollmill.plan_search import orders
from rollmill.planning.placement import PlacementOptions
from rollmill.runs.specification import import_modules

PPO = ["ppo", "CartPole-v1", "--num-envs", "8"]


@pytest.mark.parametrize(
    ("words", "grows"),
    [
        (["--objective", "grow-batch"], True),
        (["--objective=grow-batch"], True),
        (["--run-dir", "grow-batch"], False),
        (["--import", "grow-batch", "--objective", "keep-batch"], False),
        (["--objective=grow-batch", "--objective", "keep-batch"], False),
        (["--objective", "keep-batch", "--objective=grow-batch"], True),
    ],
)
def test_a_batch_grows_by_its_option_alone(words, grows, monkeypatch):
    monkeypatch.setattr(orders, "start_child", WritesPlan)
    parsed = parse_training([*PPO, "--search-plan", *words])
    with searching.request_with_plan(parsed.request, parsed.searching) as planned:
        assert ("num_envs" in planned.settings) is not grows


class WritesPlan:
    """Stands in for the process of a search."""

    def __init__(self, order, **options):
        self.file = Path(order.search.output)

    def wait(self):
        self.file.write_text("{}")
        return 0


@pytest.mark.parametrize(
    ("flags", "searches"),
    [
        (["--search-plan"], True),
        (["--no-search-plan", "--search-plan"], True),
        (["--search-plan", "--no-search-plan"], False),
        ([], False),
    ],
)
def test_the_last_flag_says_whether_a_plan_is_searched(flags, searches):
    assert parse_training([*PPO, *flags]).searching.search_plan is searches


@pytest.mark.parametrize(
    ("rest", "environment"),
    [
        (["gymnasium:CartPole-v1", "--import", "own"], "gymnasium:CartPole-v1"),
        (["CartPole-v1", "--run-dir", "gymnasium:CartPole-v1"], "CartPole-v1"),
        (["CartPole-v1", "--twin", "gymnasium:CartPole-v1", "--import", "own"], "CartPole-v1"),
        (["--seed", "3", "gymnasium:CartPole-v1"], "gymnasium:CartPole-v1"),
        (["--run-dir", "gymnasium:a", "gymnasium:CartPole-v1"], "gymnasium:CartPole-v1"),
        ([], ""),
    ],
)
def test_the_environment_of_an_algorithm_that_is_not_known_yet(rest, environment):
    assert requests._environment_in(rest) == environment


def test_only_the_run_that_is_resumed_gives_defaults(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("other").mkdir()
    Path("other/config.json").write_text(json.dumps({}))
    opened = []
    monkeypatch.setattr(
        resume, "read_options", lambda run: opened.append(run.root) or rollmill.RunOptions(devices=2)
    )
    monkeypatch.setattr(resume.RunDirectory, "open", classmethod(lambda cls, root: cls(root)))
    assert resume._placement_before(["--plan", "other", "run"]).devices == 2
    assert resume._placement_before(["run", "--import=x", "--set", "other"]).devices == 2
    assert opened == [Path("run")] * 2
    assert resume._placement_before(["--devices", "many", "run"]) == PlacementOptions()


NOTED = {
    "batch_size": "num_minibatches is the number of minibatches .*, not their size",
    "minibatch_size": "num_minibatches is the number of minibatches .*, not their size",
    "verbose": "quiet does the opposite",
}


@pytest.mark.parametrize("name", NOTED)
def test_settings_with_another_meaning_elsewhere_are_explained(name, capsys):
    sentence = NOTED[name]
    with pytest.raises(UsageError, match=f"unknown .* '{name}'. {sentence}"):
        if name == "verbose":
            rollmill.train(rollmill.ppo("CartPole-v1"), verbose=0)
        else:
            rollmill.ppo("CartPole-v1", **{name: 64})
    with contextlib.suppress(SystemExit):
        main(["train", *PPO, f"--{name.replace('_', '-')}", "1"])
    printed = capsys.readouterr().err
    assert "Did you mean" not in printed
    assert f"--{sentence.split()[0].replace('_', '-')} {sentence.split()[1]}" in printed, printed


def test_algorithms_with_a_batch_size_keep_it():
    assert rollmill.DQNConfig(batch_size=32).batch_size == 32


@pytest.mark.parametrize(
    ("path", "module", "folder"),
    [
        ("./own_parts", "own_parts", "."),
        ("sub/own_parts", "own_parts", "sub"),
        ("package/", "package", "."),
        ("package/inner/parts", "package.inner.parts", "."),
        ("/nowhere at all/own_parts", "own_parts", "'/nowhere at all'"),
    ],
)
@pytest.mark.parametrize(
    "use",
    [
        lambda path: ["train", *PPO, "--import", path],
        lambda path: ["sweep", *PPO, "--over", "seed=0..1", "--import", path],
        lambda path: ["plan", *PPO, "--distribution", f"{path}:policy"],
        lambda path: ["list", "--import", path],
    ],
    ids=["train", "sweep", "distribution", "list"],
)
def test_a_path_is_no_module_and_its_name_is_told(use, path, module, folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("package/inner").mkdir(parents=True)
    for file in ("own_parts.py", "package/__init__.py", "package/inner/__init__.py", "package/inner/parts.py"):
        Path(file).write_text("raise SystemExit('was imported')")
    with pytest.raises(SystemExit) as ended:
        main(use(path))
    printed = capsys.readouterr().err
    assert ended.value.code == 2 and f"write {module}, and set PYTHONPATH={folder} for the command" in printed, (
        printed
    )


def test_a_path_in_python_is_told_too():
    with pytest.raises(UsageError, match=r"'./own.py': expected the name.*write own, and set PYTHONPATH=\."):
        import_modules(["./own.py"])
