"""Wrong usages of every command: exit code 2 and a sentence, neither a traceback nor a file."""

import sys

from rollmill.cli import main

WRONG = """
train
train pp CartPole-v1
train ppo
train ppo CartPole-v9
train ppo Inventory-v0
train ppo CartPole-v1 --n-envs 8
train ppo CartPole-v1 --lr 1e-3
train ppo CartPole-v1 --log-dir x
train ppo CartPole-v1 --learning-rate fast
train ppo CartPole-v1 --learning-rate -1
train ppo CartPole-v1 --learning-rate linear:1
train ppo CartPole-v1 --ent-coef nan
train ppo CartPole-v1 --gamma 1.5
train ppo CartPole-v1 --num-envs 0
train ppo CartPole-v1 --num-envs 3.5
train ppo CartPole-v1 --num-minibatches 7
train ppo CartPole-v1 --total-timesteps 10
train ppo CartPole-v1 --clip-coef 0
train ppo CartPole-v1 --network.torso transformer
train ppo CartPole-v1 --network.hidden-sizes -3
train ppo CartPole-v1 --network.activation tan
train ppo CartPole-v1 --network nosuch
train ppo CartPole-v1 --seed -1
train ppo CartPole-v1 --seed 99999999999
train ppo CartPole-v1 --device cuda
train ppo CartPole-v1 --devices 64
train ppo CartPole-v1 --wandb
train ppo CartPole-v1 --track nosuch
train ppo CartPole-v1 --recipe nosuch
train ppo CartPole-v1 --recipe a3c-cartpole
train ppo CartPole-v1 --config missing.toml
train ppo CartPole-v1 --config conf.toml
train ppo CartPole-v1 --import nosuch_module
train ppo CartPole-v1 --import boom
train ppo CartPole-v1 --import ./missing.py
train ppo CartPole-v1 --transform nosuch
train ppo CartPole-v1 --transform frame-stack:x
train ppo CartPole-v1 --transform frame-stack
train ppo CartPole-v1 --transform grey
train ppo CartPole-v1 --env-option nosuch=1
train ppo CartPole-v1 --env-option max_steps
train ppo CartPole-v1 --env-option max_steps=0
train ppo CartPole-v1 --distribution nosuch
train ppo CartPole-v1 --distribution single-learner-coarse --actors 0
train ppo CartPole-v1 --actors 5
train ppo CartPole-v1 --plan missing.json
train ppo CartPole-v1 --plan bad.json
train ppo CartPole-v1 --run-dir empty/../file.txt
train ppo CartPole-v1 --start-from empty
train ppo CartPole-v1 --clone missing.npz
train ppo CartPole-v1 --clone file.txt
train ppo CartPole-v1 --clone s3://bucket/file.npz
train ppo CartPole-v1 --clone file.txt --start-from empty
train ppo CartPole-v1 --clone-updates 5
train ppo CartPole-v1 --rnd-coef -1
train ppo CartPole-v1 --rnd-coef 1 --normalize-rewards
train ppo CartPole-v1 --rnd-coef 1 --network.torso gru
evaluate random --env CartPole-v1 --record file.txt
evaluate random --env CartPole-v1 --record missing/file.npz
evaluate random --env TagGridWorld-Small-v0 --episodes 1 --record new.npz
train ppo CartPole-v1 --desired-kl 0.01
train ppo CartPole-v1 --kl-factor 2
train ppo CartPole-v1 --bound-coef 0.1
train ppo TicTacToe-v0
train ppo TagGridWorld-v0
train ppo gymnasium:NoSuch-v1
train ppo nosuch:CartPole-v1
train dqn Pendulum-v1
train sac CartPole-v1 --learning-starts 10 --batch-size 256
train td3 CartPole-v1
train alphazero CartPole-v1
train mappo CartPole-v1
train dqn CartPole-v1 --buffer-size 2
train dqn CartPole-v1 --policy-kwargs x
resume
resume missing
resume empty
evaluate
evaluate missing
evaluate empty --episodes 0
evaluate random
evaluate random --env NoSuch-v0
render missing
render empty --output picture.jpg
plot
plot missing
plot empty
export empty
export missing --format onnx
export missing --format pickle
serve missing
serve missing --port 99999999
play CartPole-v1
play missing
profile ppo
profile compare missing missing
sweep ppo CartPole-v1
sweep ppo CartPole-v1 --over nosuch=1,2
sweep ppo CartPole-v1 --over learning-rate
sweep ppo CartPole-v1 --over seed=4..0
sweep ppo CartPole-v1 --over learning-rate=a,b
sweep --resume missing
plan ppo CartPole-v1 --distribution nosuch
explain fusion NoSuch-v0
list nothing
list environment
runs missing
board missing
gpu nosuch
warm ppo
doctor missing
completion
completion tcsh
train ppo CartPole-v1 --num-env 8
train ppo CartPole-v1 --n-steps 128
train ppo CartPole-v1 --batch-size 100
train ppo CartPole-v1 --n-epochs 4
train ppo CartPole-v1 --clip-range 0.2
train ppo CartPole-v1 --clip-range-vf 0.2
train ppo CartPole-v1 --use-sde
train ppo CartPole-v1 --capture-video
train ppo CartPole-v1 --wandb-project x
train ppo CartPole-v1 --max-grad-norm None
train ppo CartPole-v1 --ent-coef linear:0.01
train ppo CartPole-v1 --learning-rate lambda
train ppo CartPole-v1 --num-envs 15 --num-steps 1 --num-minibatches 4
train ppo CartPole-v1 --num-envs
train ppo CartPole-v1 --num-envs eight
train ppo CartPole-v1 --num-envs -4
train ppo CartPole-v1 --total-timesteps 1e99
train ppo CartPole-v1 --gamma -0.1
train ppo CartPole-v1 --gae-lambda 2
train ppo CartPole-v1 --update-epochs 0
train ppo CartPole-v1 --seed one
train ppo CartPole-v1 --num-seeds 0
train ppo CartPole-v1 --evaluate-every 0
train ppo CartPole-v1 --keep-last 0
train ppo CartPole-v1 --log-every 0
train ppo CartPole-v1 --fusion maybe
train ppo CartPole-v1 --numerics half
train ppo CartPole-v1 --place moon
train ppo CartPole-v1 --network.torso gru --network.torso
train ppo CartPole-v1 Acrobot-v1
train ppo cartpole
train ppo gymnasium:CartPole
train ppo Pendulum-v1 --recipe cartpole-two-cores --network setnet
train dqn CartPole-v1 --network setnet
train sac Pendulum-v1 --network setnet
train ppo CartPole-v1 --import ./inventory.py
train impala CartPole-v1 --num-envs 7 --distribution single-learner-coarse --actors 2
train ippo CartPole-v1
train ddpg CartPole-v1
train pqn Pendulum-v1
train r2d2 CartPole-v1 --network.torso mlp
train r2d2 CartPole-v1 --burn-in 32
train r2d2 CartPole-v1 --sequence-length 40
train r2d2 CartPole-v1 --buffer-size 200
train rsac Pendulum-v1 --network.torso mlp
train rsac Pendulum-v1 --burn-in 32
train rsac Pendulum-v1 --fusion full
train sac Pendulum-v1 --network.torso gru
resume empty --set num_envs=4
resume empty --set nosuch=1
evaluate empty --checkpoint 12
evaluate empty --against random --watch
export empty --format torch
serve empty --host 0.0.0.0
serve empty --max-batch 0
play empty --second --first
sweep ppo CartPole-v1 --over seed=0..1 --trials -1
sweep ppo CartPole-v1 --over gamma=2
plot empty --x hours
plan ppo CartPole-v1 --budget -3
trian ppo CartPole-v1
--nosuch
"""


def test_every_wrong_usage_is_answered_by_a_sentence(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # of the modules that are imported here
    (tmp_path / "boom.py").write_text("raise ValueError('no')\n")
    (tmp_path / "conf.toml").write_text("learning_rat = 1\n")
    (tmp_path / "bad.json").write_text("{")
    (tmp_path / "file.txt").write_text("x")
    (tmp_path / "empty").mkdir()
    before = sorted(tmp_path.rglob("*"))
    answers = {}
    for line in WRONG.strip().splitlines():
        try:
            code = main(line.split())
        except SystemExit as stopped:
            code = stopped.code
        printed = capsys.readouterr()
        answers[line] = (code, printed.out + printed.err)
    assert [line for line, (code, _) in answers.items() if code != 2] == []
    assert [line for line, (_, text) in answers.items() if "Traceback" in text or not text.strip()] == []
    assert sorted(tmp_path.rglob("*")) == before
