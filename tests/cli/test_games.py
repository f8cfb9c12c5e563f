"""`rollmill play` and matches of `rollmill evaluate`, with a small policy for tic-tac-toe."""

import json
import subprocess
import sys

import pytest

SMALL = [
    "--num-envs",
    8,
    "--num-steps",
    8,
    "--num-minibatches",
    2,
    "--num-simulations",
    8,
    "--network.hidden-sizes",
    16,
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory, environment_variables):
    """A run of three iterations with a checkpoint of each, which tests only read."""
    root = tmp_path_factory.mktemp("games")
    options = [
        *SMALL,
        "--total-timesteps",
        192,
        "--checkpoint-iterations",
        1,
        "--no-tensorboard",
        "--run-dir",
        "run",
    ]
    command = [sys.executable, "-m", "rollmill", "train", "alphazero", "TicTacToe-v0", *map(str, options)]
    subprocess.run(command, cwd=root, env=environment_variables, capture_output=True, text=True, check=True)
    return root / "run"


def played(rollmill, *arguments, moves):
    process = rollmill.start("play", *arguments, stdin=subprocess.PIPE)
    output, errors = process.communicate("\n".join(moves), timeout=300)
    return process.returncode, output, errors


@pytest.mark.slow
def test_a_person_plays_a_whole_game(trained, rollmill):
    """Who asks for the policy's own choices is told them, and bad moves are asked for again."""
    moves = ["4", "?", "4", "middle", *map(str, range(9))]
    code, output, errors = played(rollmill, trained, moves=moves)
    assert code == 0, errors
    assert output.startswith("TicTacToe-v0: you are X and move first.") and "the policy would play " in output
    assert "4 is not a legal move. Legal moves: 0" in output or "4 is not a legal move. Legal moves: 1" in output
    assert "'middle' is not a number." in output
    assert output.splitlines()[-1] in ("You won.", "You lost.", "A draw.")
    lines = output.splitlines()
    assert lines[2:5] == ["0 1 2", "3 4 5", "6 7 8"] and "3 X 5" in lines
    last = lines[-5:-2]
    assert abs(sum(line.count("X") - line.count("O") for line in last)) <= 1


@pytest.mark.slow
def test_the_policy_may_begin_and_a_person_may_stop(trained, rollmill):
    code, output, _ = played(rollmill, trained, "--second", "--checkpoint", 1, moves=["q"])
    assert code == 0 and output.splitlines()[-1].endswith("game abandoned")
    assert "you are O and move second" in output and output.index("policy: ") < output.index("you (")
    code, output, _ = played(rollmill, trained, moves=[])
    assert code == 0 and "game abandoned" in output


@pytest.mark.slow
def test_matches_against_fixed_opponents_and_earlier_checkpoints(trained, rollmill):
    against = ["--against", "lookahead-1", "--episodes", 20, "--json"]
    done = rollmill("evaluate", trained, *against)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["games"] == 20 == sum(sum(found[side].values()) for side in ("moving_first", "moving_second"))
    won = [found[side]["won"] + found[side]["drawn"] / 2 for side in ("moving_first", "moving_second")]
    assert found["score"] == pytest.approx(sum(won) / 20)
    earlier = rollmill(
        *("evaluate", trained, "--against", trained, "--against-checkpoint", 1),
        *("--episodes", 10, "--opening-plies", 2),
    )
    assert earlier.returncode == 0, earlier.stderr
    assert "iteration 3 against" in earlier.stdout and "(iteration 1): score 0." in earlier.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--against", "rnd"], "unknown opponent 'rnd'. hint: use random, lookahead-1"),
        (["--against", "no/such/run"], "no/such/run does not exist"),
        (["--against", "random", "--episodes", "3"], "games=3 must be even"),
        (
            ["--checkpoint", "newest"],
            "checkpoint='newest' must be last, best or the iteration of a saved checkpoint: 1",
        ),
        (["--checkpoint", "77"], "has no checkpoint 77. Known: 1, 2, 3"),
    ],
)
@pytest.mark.slow
def test_bad_input_is_one_message_and_exit_code_2(trained, rollmill, arguments, message):
    done = rollmill("evaluate", trained, *arguments)
    assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr
