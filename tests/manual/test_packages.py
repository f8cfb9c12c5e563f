"""The wheel, the archive of the source, and the images' files."""

import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import tomllib
import urllib.request
import zipfile

import pytest

from manual.snippets import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
IMAGES = [ROOT / "Dockerfile", ROOT / "Dockerfile.cuda"]


def run(*command, cwd, **environment):
    done = subprocess.run(
        [*map(str, command)], cwd=cwd, env=os.environ | environment, capture_output=True, text=True, timeout=1500
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    for module in ("build", "hatchling", "twine"):
        pytest.importorskip(module, reason=f"{module} is not installed: pip install 'rollmill[release]'")
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT, cwd=folder)
    return folder


@pytest.mark.slow
def test_the_wheel_holds_the_package_alone_and_the_archive_what_tests_need(built):
    (wheel,), (archive,) = built.glob("*.whl"), built.glob("*.tar.gz")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.partition("/")[0] for name in names} == {
        "rollmill",
        f"rollmill-{PROJECT['version']}.dist-info",
    }
    sources = {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src/rollmill").rglob("*.py")}
    assert sources <= set(names)
    with tarfile.open(archive) as opened:
        packed = {name.partition("/")[2] for name in opened.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "tests/conftest.py", "docs/index.md"} <= packed
    assert not [name for name in packed if name.startswith((".venv", "runs", "site"))]


@pytest.mark.slow
def test_the_description_is_one_that_an_index_can_show(built):
    printed = run(sys.executable, "-m", "twine", "check", "--strict", *built.iterdir(), cwd=built)
    assert printed.count("PASSED") == 2


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory):
    """The wheel in a fresh environment, with what it names as its dependencies: neither extras nor this clone."""
    folder = tmp_path_factory.mktemp("fresh") / "venv"
    run(sys.executable, "-m", "venv", folder, cwd=built)
    python = folder / "bin/python"
    run(python, "-m", "pip", "install", "--quiet", *built.glob("*.whl"), cwd=built, PYTHONPATH="")
    where = run(python, "-c", "import rollmill; print(rollmill.__file__)", cwd=built, PYTHONPATH="")
    assert where.startswith(str(folder))
    return folder


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_wheel_alone_trains_in_a_fresh_environment(installed, tmp_path):
    sizes = ["--total-timesteps", "2048", "--num-envs", "8", "--num-steps", "32", "--run-dir", "run"]
    command = installed / "bin/rollmill"
    printed = run(command, "train", "ppo", "CartPole-v1", *sizes, cwd=tmp_path, PYTHONPATH="")
    assert "final return" in printed
    assert "mean return" in run(command, "evaluate", "run", "--episodes", "4", cwd=tmp_path, PYTHONPATH="")
    run(command, "doctor", cwd=tmp_path, PYTHONPATH="")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_wheel_alone_does_the_first_steps_of_the_tutorial_and_shows_its_run(installed, tmp_path):
    """Word by word: the file, and the commands as a shell runs them."""
    steps = (ROOT / "docs/tutorial.md").read_text().partition("\n## 4")[0]
    pieces = re.findall(r"^```python title=\"boat.py\"\n(.*?)^```", steps, re.M | re.S)
    check, train = re.findall(r"^```bash\n(.*?)^```", steps, re.M | re.S)
    (tmp_path / "boat.py").write_text("\n\n".join(pieces))
    variables = {"PATH": f"{installed / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": ""}
    assert "passed all checks" in run("bash", "-ec", check, cwd=tmp_path, **variables)
    assert "final return" in run("bash", "-ec", train, cwd=tmp_path, **variables)
    environment = os.environ | variables
    with subprocess.Popen(
        ["rollmill", "board", "."], cwd=tmp_path, env=environment, stdout=subprocess.PIPE
    ) as board:
        address = board.stdout.readline().decode().split()[-1]
        opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
        assert b"<html" in opener.open(address, timeout=60).read()
        (row,) = json.load(opener.open(address.partition("?")[0] + "rows?since=0", timeout=300))["rows"]
        board.send_signal(signal.SIGINT)
    assert board.returncode == 130
    assert (row["environment"], row["state"], row["steps"] >= 200_000) == ("Boat-v0", "finished", True)


@pytest.mark.parametrize("image", IMAGES, ids=lambda image: image.name)
def test_an_image_installs_extras_that_exist_from_files_that_exist(image):
    text = image.read_text()
    (extras,) = re.findall(r"pip install .*\.\[([\w,]+)\]", text)
    assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"])
    copied = [word for line in re.findall(r"^COPY (.*) \S+$", text, re.M) for word in line.split()]
    assert {"pyproject.toml", "README.md", "LICENSE", "src"} == set(copied)
    assert all((ROOT / name).exists() for name in copied)
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert set(copied) == kept
    assert re.search(r"^USER (?!root)", text, re.M) and 'ENTRYPOINT ["rollmill"]' in text


def test_the_images_have_a_python_that_the_package_allows():
    (version,) = re.findall(r"^FROM python:(3\.\d+)-", IMAGES[0].read_text(), re.M)
    assert f"Programming Language :: Python :: {version}" in PROJECT["classifiers"]
