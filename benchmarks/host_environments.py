"""Host environments in one process: Rollmill's vectors beside Gymnasium's and EnvPool's own.

    python benchmarks/host_environments.py CartPole-v1 HalfCheetah-v5

Random actions, no policy, episodes reset as they end; environment steps a second. Rollmill's figures include what
the others do not do: float32 observations in arrays handed in, returns and lengths of episodes, final
observations, and, for EnvPool, resets in the same step. Runs take turns, so that a busy machine slows all alike.
"""

import argparse
import itertools
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from measure import RESULTS, spread, write_result

from rollmill import envs
from rollmill.core.types import HostEnvironment
from rollmill.envs.host import allocate

Advance = Callable[[np.ndarray], object]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", help="ids that Gymnasium has, and EnvPool if it is installed")
    parser.add_argument("--num-envs", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--threads", type=int, default=2, help="of EnvPool")
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.5, help="of each run")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    result = {
        name: {n: compare(name, n, options.threads, options.runs, options.seconds) for n in options.num_envs}
        for name in options.names
    }
    write_result("host-environments", result, directory=options.output)


def compare(name: str, num_envs: int, threads: int, runs: int, seconds: float) -> dict[str, dict]:
    contestants = {
        "gymnasium.SyncVectorEnv": gymnasium_vector(name, num_envs),
        "rollmill gymnasium:": host_vector(envs.make(f"gymnasium:{name}"), num_envs),
    }
    try:
        import envpool
    except ImportError:
        print("EnvPool is not installed: pip install 'rollmill[envpool]'")
    else:
        pool = envpool.make(name, env_type="gymnasium", num_envs=num_envs, num_threads=threads)
        pool.reset()
        contestants["envpool"] = pool.step
        contestants["rollmill envpool:"] = host_vector(envs.make(f"envpool:{name}", num_threads=threads), num_envs)
    space = gymnasium.vector.utils.batch_space(envs.make(f"gymnasium:{name}").action_space, num_envs)
    space.seed(0)
    actions = [space.sample() for _ in range(64)]
    rates: dict[str, list[float]] = {who: [] for who in contestants}
    for _ in range(runs):
        for who, advance in contestants.items():
            rates[who].append(num_envs * steps_per_second(advance, actions, seconds))
    for who, measured in rates.items():
        print(f"{name}, {num_envs}: {who:25} {spread(measured)['median']:12,.0f} steps/s")
    return {who: spread(measured) for who, measured in rates.items()}


def gymnasium_vector(name: str, num_envs: int) -> Advance:
    vector = SyncVectorEnv([lambda: gymnasium.make(name)] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP)
    vector.reset(seed=0)
    return vector.step


def host_vector(env: HostEnvironment, num_envs: int) -> Advance:
    vector, out = env.start(range(num_envs), seed=0), allocate(envs.step_struct(env, num_envs))
    vector.reset(out=out)
    return partial(vector.step, out=out)


def steps_per_second(advance: Advance, actions: list[np.ndarray], seconds: float) -> float:
    supply, count, start = itertools.cycle(actions), 0, time.perf_counter()
    while (elapsed := time.perf_counter() - start) < seconds:
        advance(next(supply))
        count += 1
    return count / elapsed


if __name__ == "__main__":
    main()
