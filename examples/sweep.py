"""A sweep from Python: which learning rate suits CartPole-v1 best, in the mean over two seeds.

    python examples/sweep.py [DIRECTORY]

The same as a command:

    rollmill sweep ppo CartPole-v1 --total-timesteps 60000 --num-envs 16 --num-steps 64 \
        --over learning-rate=2.5e-4,2.5e-3 --over seed=0..1
"""

import sys
from statistics import mean

import rollmill


def main() -> None:
    sweep = rollmill.sweep(
        "ppo",
        "CartPole-v1",
        over={"learning_rate": [2.5e-4, 2.5e-3], "seed": range(2)},
        total_timesteps=60_000,
        num_envs=16,
        num_steps=64,
        sweep_dir=sys.argv[1] if len(sys.argv) > 1 else None,
    )
    print("mean final return by learning rate:")
    for rate in sorted({row["learning_rate"] for row in sweep.rows}):
        returns = [row["final_return"] for row in sweep.rows if row["learning_rate"] == rate]
        print(f"  {rate:g}: {mean(returns):.1f}")
    print(f"learning curves: {sweep.directory / 'report.html'}")


if __name__ == "__main__":
    main()
