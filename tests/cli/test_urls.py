"""URLs where a path is expected are refused, and no folder of that name comes to be."""

import re
from pathlib import Path

import pytest

import rollmill
from rollmill.cli.main import main
from rollmill.core.local_paths import local_path
from wordings import raises

URL = "s3://bucket/x"
OTHER = "hdfs://bucket/x"
"""A URL that no run can have."""
TRAIN = ("ppo", "CartPole-v1")


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    yield
    assert [path.name for path in tmp_path.iterdir() if ":" in path.name] == []


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (("train", *TRAIN, "--run-dir", OTHER), "--run-dir"),
        (("train", *TRAIN, f"--run-dir={OTHER}"), "--run-dir"),
        (("train", *TRAIN, "--start-from", OTHER), "start_from"),
        (("train", *TRAIN, "--plan", f"{URL}.json"), "plan"),
        (("train", *TRAIN, "--config", f"{URL}.toml"), "config"),
        (("plan", *TRAIN, "--output", f"{URL}.json"), "output"),
        (("profile", *TRAIN, "--output", URL), "output"),
        (("profile", "compare", URL, URL), "before"),
        (("sweep", *TRAIN, "--over", "gamma=0.9,0.99", "--sweep-dir", URL), "--sweep-dir"),
        (("sweep", "--resume", URL), "resume"),
        (("resume", OTHER), "run"),
        (("evaluate", OTHER), "run"),
        (("serve", OTHER), "run"),
        (("play", OTHER), "run"),
        (("doctor", OTHER), "run"),
        (("export", OTHER), "run"),
        (("export", "run", "--output", f"{URL}.onnx"), "output"),
        (("render", OTHER), "run"),
        (("render", "run", "--output", f"{URL}.gif"), "output"),
        (("plot", OTHER), "runs"),
        (("plot", "run", "--output", f"{URL}.html"), "output"),
        (("serve", "run", "--address-file", URL), "--address-file"),
    ],
)
def test_commands(words, option, capsys):
    with pytest.raises(SystemExit) as ended:
        main(list(words))
    assert ended.value.code == 2
    printed = capsys.readouterr()
    assert re.search(f"{option}=(s3|hdfs)://bucket/x", printed.err) and "aws s3 sync" in printed.err, printed
    assert "Traceback" not in printed.err


def probe():
    return rollmill.ppo("CartPole-v1", num_envs=4, num_steps=4, total_timesteps=64)


def other(url):
    return type(url)(str(url).replace("s3:", "hdfs:"))


@pytest.mark.parametrize("form", [str, Path])
@pytest.mark.parametrize(
    "use",
    [
        lambda url: rollmill.train(probe(), run_dir=other(url)),
        lambda url: rollmill.train(probe(), start_from=str(other(url))),
        lambda url: rollmill.train(probe(), plan=url),
        lambda url: rollmill.sweep("ppo", "CartPole-v1", over={"gamma": [0.9]}, sweep_dir=url),
        lambda url: rollmill.resume(other(url)),
        lambda url: rollmill.evaluate(other(url)),
        lambda url: rollmill.load(other(url)),
        lambda url: rollmill.match(other(url), "random"),
        lambda url: rollmill.render(other(url)),
        lambda url: rollmill.replay(other(url)),
        lambda url: rollmill.export(other(url), "policy.onnx"),
        lambda url: rollmill.export("run", url),
        lambda url: rollmill.plot(other(url)),
        lambda url: rollmill.plot("run", output=url),
        lambda url: rollmill.hooks.csv_log(url),
    ],
)
def test_functions(use, form):
    with raises("is-url-and-rollmill-reads", "://bucket/x"):
        use(form(URL))


@pytest.mark.parametrize("url", ["gs://b/x", "hdfs://host:9000/x", "https://host/x", "S3://b", "abfs+tls://c@a/x"])
def test_schemes(url):
    for path in (url, Path(url)):
        with raises("is-url-and-rollmill-reads"):
            local_path("run_dir", path)


def test_files_have_a_path():
    with raises("is-url-expected-path-hint", "run_dir", "file://tmp/x", "tmp/x"):
        local_path("run_dir", "file:///tmp/x")


@pytest.mark.parametrize("path", ["runs/a", "/data/s3:/x", "a:b", "C:/x", "s3", "runs/s3://x", "ppo-ale:pong"])
def test_paths(path):
    assert local_path("run_dir", path) == Path(path)
