"""A package that offers an environment, an algorithm and a network by entry points, without `--import`."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from rollmill.core.plugins import plugins

MODULE = '''
"""The module of the package."""

from dataclasses import dataclass

import rollmill


@dataclass(frozen=True)
class RateConfig:
    """Hyperparameters of PPO with a rate that is squared."""

    total_timesteps: int = 128
    """Environment steps of the training."""
    root_rate: float = 0.05
    """Root of the learning rate."""
    network: rollmill.NetworkConfig = rollmill.NetworkConfig()
    """The network."""


def build(env, config):
    """PPO whose learning rate is a square."""
    sizes = {"num_envs": 4, "num_steps": 8, "num_minibatches": 2, "update_epochs": 1}
    rate = config.root_rate**2
    return rollmill.ppo(
        env, **sizes, total_timesteps=config.total_timesteps, learning_rate=rate, network=config.network
    )


def short(max_steps: int = 5):
    """CartPole in short episodes."""
    return rollmill.time_limit(rollmill.make("CartPole-v1"), max_steps)


def thin(key, observation_space, action_space):
    """A network of three neurons."""
    config = rollmill.NetworkConfig(hidden_sizes=(3,))
    return rollmill.actor_critic(key, observation_space, action_space, config)


rollmill.register_algorithm("square-ppo", build, RateConfig)
rollmill.register("Short-v0", short)
rollmill.register_network("thin", thin)
'''
POINTS = {
    "environments": {"Short-v0": "plugged.parts"},
    "algorithms": {"square-ppo": "plugged.parts"},
    "networks": {"thin": "plugged.parts"},
}


def install(folder: Path, name: str, points: dict, *, version="1.2") -> None:
    """The files that an installer would leave."""
    information = folder / f"{name}-{version}.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = []
    for group, offered in points.items():
        lines += [f"[rollmill.{group}]", *(f"{point} = {module}" for point, module in offered.items()), ""]
    (information / "entry_points.txt").write_text("\n".join(lines))


@pytest.fixture
def site(tmp_path):
    folder = tmp_path / "site"
    install(folder, "plugged", POINTS)
    (folder / "plugged").mkdir()
    (folder / "plugged/__init__.py").write_text("")
    (folder / "plugged/parts.py").write_text(MODULE)
    return folder


@pytest.mark.slow
def test_an_installed_package_needs_no_import(rollmill, site, tmp_path):
    installed = {"env": {"PYTHONPATH": os.pathsep.join([str(site), *sys.path])}}
    listed = rollmill("list", **installed)
    assert listed.stderr == "" and listed.stdout.count("[plugged 1.2]") == 3
    assert "CartPole in short episodes. [plugged 1.2]" in listed.stdout
    options = ["--root-rate", "0.03", "--network", "thin", "--env-option", "max_steps=4", "--run-dir", "run"]
    where = ["--distribution", "single-learner-coarse", "--actors", "2"]
    done = rollmill("train", "square-ppo", "Short-v0", *options, *where, "--total-timesteps", "96", **installed)
    assert done.returncode == 0, done.stderr
    config = json.loads((tmp_path / "run/config.json").read_text())
    graph = config["graph"]
    assert config["imports"] == [] and graph["custom"] == [] and config["plan"]["place"] == "processes"
    assert (graph["algorithm"], graph["environment"]) == ("square-ppo", "Short-v0")
    assert (graph["config"]["root_rate"], graph["config"]["network"]["name"]) == (0.03, "thin")
    done = rollmill("resume", "run", "--set", "total_timesteps=160", **installed)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "run/summary.json").read_text())["total_env_steps"] == 160
    done = rollmill("evaluate", "run", "--episodes", "3", "--json", **installed)
    assert done.returncode == 0 and json.loads(done.stdout)["mean_length"] == 4, done.stderr
    done = rollmill("evaluate", "run", "--episodes", "2")
    assert done.returncode == 2 and "environment 'Short-v0'" in done.stderr and "Traceback" not in done.stderr


def python(site: Path, code: str) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), *sys.path])}
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_packages_are_imported_when_a_name_of_theirs_is_looked_up(site):
    printed = python(
        site,
        """
        import sys, rollmill
        rollmill.make("CartPole-v1"); rollmill.ppo("CartPole-v1", network="mlp")
        print("plugged.parts" in sys.modules)
        rollmill.make("Short-v0", max_steps=3)
        print("plugged.parts" in sys.modules)
        from rollmill.runs.custom_names import only_here
        from rollmill.runs.algorithms import find_algorithm
        from rollmill.runs.specification import describe
        graph = find_algorithm("square-ppo").build("Short-v0", network=rollmill.NetworkConfig(name="thin"))
        print(only_here(describe(graph), []))
        """,
    )
    assert printed.split() == ["False", "True", "[]"]


@pytest.mark.slow
def test_names_that_the_package_registers_when_imported_by_hand_are_its_own_too(site):
    printed = python(
        site,
        """
        import rollmill, plugged.parts
        from rollmill.runs.custom_names import only_here
        from rollmill.runs.specification import describe
        print(only_here(describe(rollmill.ppo("Short-v0")), []))
        rollmill.register("Short-v0", lambda: rollmill.make("CartPole-v1"), overwrite=True)
        print(only_here(describe(rollmill.ppo("Short-v0")), []))
        """,
    )
    assert printed.splitlines() == ["[]", "['environment Short-v0']"]


BROKEN = {
    "environments": {"Gone-v0": "gone.nowhere", "Silent-v0": "silent", "CartPole-v1": "silent", "Short-v0": "x.y"},
    "networks": {"loud": "loud", "exits": "exits", "no module!": "?"},
}


@pytest.mark.slow
def test_a_broken_package_breaks_nothing_else(site):
    install(site, "broken", BROKEN)
    (site / "silent.py").write_text("")
    (site / "loud.py").write_text("1 / 0")
    (site / "exits.py").write_text("raise SystemExit(3)")
    printed = python(
        site,
        """
        import contextlib, sys
        import rollmill
        from rollmill.runs.algorithms import find_algorithm
        from rollmill.cli import listing
        cases = (rollmill.make, "Gone-v0"), (rollmill.make, "Short-v0"), (find_algorithm, "square-pppo")
        for find, name in cases:
            try: find(name)
            except rollmill.RollmillError as error: print(error)
        with contextlib.redirect_stderr(sys.stdout):
            assert listing.run([]) == 0
        """,
    )
    assert "  CartPole-v1 " in printed and "  square-ppo " in printed and "  thin  " in printed
    for sentence in (
        "note: the package broken 1.2, which provides the environment 'Gone-v0', cannot be used: ModuleNotFound",
        "module silent does not register this name when it is imported. hint: call rollmill.register('Silent-v0'",
        "the name 'CartPole-v1', which the package broken 1.2 provides, is already taken",
        "the network 'loud', cannot be used: ZeroDivisionError: division by zero, at ",
        "the network 'exits', cannot be used: SystemExit: 3",
        "the package broken 1.2, which provides the environment 'Gone-v0', cannot be used",
        "several packages provide the environment 'Short-v0': plugged 1.2 (plugged.parts) and broken 1.2 (x.y).",
        "unknown algorithm 'square-pppo'. Did you mean square-ppo",
    ):
        assert sentence in printed, printed


def test_a_package_whose_files_cannot_be_read_hides_no_other(site, monkeypatch):
    (site / "unreadable-1.0.dist-info").mkdir()
    (site / "unreadable-1.0.dist-info/entry_points.txt").write_bytes(b"\xff\xfe[")
    (site / "bare-1.0.dist-info").mkdir()
    (site / "bare-1.0.dist-info/entry_points.txt").write_text("[rollmill.networks]\nbare = bare\n")
    monkeypatch.syspath_prepend(str(site))
    found = {plugin.name: plugin.package for plugin in plugins("network")}
    assert found == {"thin": "plugged 1.2", "bare": f"in {site}"}
