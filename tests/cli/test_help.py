"""Help: what `--help` shows first, what `--help-all` adds, and the search for options."""

import json
import re
import shutil
import subprocess

import pytest

import rollmill
from rollmill.cli.help import COMMON
from rollmill.cli.main import COMMANDS, main


@pytest.fixture
def printed(capsys, monkeypatch):
    """`printed("train", "ppo", "--help")` returns the exit code and the output in 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")

    def run(*words):
        with pytest.raises(SystemExit) as ended:
            main([*words])
        return ended.value.code, capsys.readouterr().out

    return run


SUBJECTS = [f"{name} --help" for name in COMMANDS if name not in ("help", "doctor")]


@pytest.mark.parametrize("words", [*SUBJECTS, "train ppo --help", "train sac --help-all", "sweep ppo --help"])
def test_helps_fit_80_columns(printed, words):
    code, text = printed(*words.split())
    assert code == 0 and text.startswith("usage: rollmill")
    assert [line for line in text.splitlines() if len(line) > 80] == []


def test_help_of_a_training_describes_common_options_and_names_all(printed):
    _, short = printed("train", "ppo", "--help")
    _, whole = printed("train", "ppo", "--help-all")
    described = lambda text: re.findall(r"^  --([\w.-]+)", text, re.M)
    assert described(short) == [*COMMON] and len(COMMON) == 10
    assert set(described(whole)) <= set(re.findall(r"--([\w.-]+)", short))
    assert len(short.splitlines()) < 70 < 150 < len(whole.splitlines())


def test_options_of_a_command_are_described_beside_common_ones(printed):
    _, text = printed("profile", "ppo", "--help")
    assert "\noptions of rollmill profile:\n" in text and re.search(r"^  --windows INT", text, re.M)


def test_options_are_found_by_words_of_their_names_and_meanings(printed):
    code, text = printed("help", "max", "batch")
    assert code == 0 and "--max-batch INT" in text and "[serve]" in text
    _, text = printed("help", "--ent_coef")
    assert text.startswith("  --ent-coef") and "ppo" in text
    code, text = printed("help", "zzz")
    assert code == 1 and text == "No option contains 'zzz' in its name or description.\n"
    assert printed("help")[1] == printed("--help")[1] and printed("help", "plot") == printed("plot", "--help")


def test_parts_are_listed_by_kind_and_as_json(printed):
    code, text = printed("list", "algorithms", "--json")
    assert code == 0 and {"name", "summary"} == set(json.loads(text)["algorithms"][0])
    _, text = printed("list", "environments")
    assert "CartPole-v1" in text and "algorithms:" not in text


def test_the_version_is_told(printed):
    assert printed("-V") == printed("--version") == (0, f"rollmill {rollmill.__version__}\n")


COMPLETED = {
    "tr": ["train"],
    "train p": ["ppo", "pqn"],
    "train ppo CartP": ["CartPole-v1"],
    "train ppo CartPole-v1 --ent": ["--ent-coef"],
    "train dqn CartPole-v1 --ent": [],
    "sweep ppo CartPole-v1 --fusion r": ["rollout"],
    "train --recipe cartpole-two": ["cartpole-two-cores"],
    "render RUN --stoch": ["--stochastic"],
    "completion z": ["zsh"],
}


def test_bash_completes_commands_names_and_options(printed):
    code, script = printed("completion", "bash")
    asked = [f"COMP_WORDS=(rollmill {words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))" for words in COMPLETED]
    script += "".join(f'{words}; _rollmill; echo "${{COMPREPLY[*]}}"\n' for words in asked)
    answers = subprocess.run(["bash"], input=script, capture_output=True, text=True, check=True).stdout
    assert code == 0 and [line.split() for line in answers.splitlines()] == [*COMPLETED.values()]


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
def test_fish_completes_commands_names_and_options(printed, tmp_path):
    script = printed("completion", "fish")[1] + "".join(f"complete -C 'rollmill {w}'; echo -\n" for w in COMPLETED)
    done = subprocess.run(
        ["fish", "--no-config"],
        input=script,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"HOME": str(tmp_path)},
    )
    answers = [each.split("\n") for each in done.stdout.split("-\n")]
    named = [[line.partition("\t")[0] for line in lines if line] for lines in answers][: len(COMPLETED)]
    assert done.stderr == "" and named == [*COMPLETED.values()]


def test_zsh_reads_the_same_script_by_its_adapter_of_bash(printed):
    bash, zsh = printed("completion", "bash")[1], printed("completion", "zsh")[1]
    assert "bashcompinit" in zsh and zsh.endswith(bash.partition("\n")[2])
