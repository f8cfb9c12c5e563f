"""Self-play of AlphaZero in Connect Four, no learning: Rollmill beside Pgx with mctx, by the same network.

    python benchmarks/self_play.py [--network mlp resnet] [--games 1024] [--simulations 32 128] [--only rollmill]

The other side is written after Pgx's own example of AlphaZero: a batched Gumbel search of mctx that steps Pgx's
game under `vmap`, and auto-reset. Both sides play with the same weights on observations of the same form, with as
many games, simulations and considered actions, the same scale of noise and of values, values bounded by a tanh and
illegal actions masked; both store what their training would read. Games go on from call to call, so that both
sides see them at all stages.

Sides are compiled one after the other, and then take turns; a figure is the median of several calls, in moves a
second over all games. `over_pgx` is Pgx's seconds over Rollmill's, call by call. Of a move of all games, the
network and the environment are timed alone as well, as often as a search evaluates and steps them; the rest is the
tree.
Writes results/self-play-cpu.json or results/self-play-gpu.json.
"""

import contextlib
import importlib
import itertools
import time
from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from statistics import median
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree
from measure import in_turns, one_of, options, platform, some_of, spread, write_result

import rollmill
from rollmill.core.machine import keep_freed_memory
from rollmill.core.types import Key
from rollmill.dataflow import Graph, init_state, step_all
from rollmill.envs.connect_four import connect_four

ENVIRONMENT = "ConnectFour-v0"
RESNET = {"torso": "resnet", "hidden_sizes": (64,), "activation": "relu", "shared_torso": True}
NETWORKS = {
    "mlp": rollmill.NetworkConfig(hidden_sizes=(64, 64), activation="relu", shared_torso=True),
    "small-resnet": rollmill.NetworkConfig(**RESNET, num_blocks=2, channels=32),
    "resnet": rollmill.NetworkConfig(**RESNET, num_blocks=6, channels=128),
}
"""The last is of the size of the network in Pgx's example."""
GAMES = {"cpu": [64], "gpu": [1_024]}
"""Games side by side."""

CONSIDERED = 16
"""Most actions that a search considers at its root: here, all seven."""
GUMBEL_SCALE = 1.0
VALUE_SCALE, RESCALE_VALUES = 0.5, False
"""How mctx transforms values: as Rollmill does in games for two players.

Values there lie between -1 and 1, so that they need no rescaling by the least and the greatest of a node; half of
their scale is that of values between 0 and 1.
"""

ROLLMILL, PGX = "rollmill", "pgx"
Function = Callable[..., Any]


class Side(NamedTuple):
    """One of the two ways to play, with the games that it begins with."""

    play: Function
    """`(weights, games, key) -> games after several moves, what a training would read of them`."""
    games: PyTree[Array]
    steps: Function
    """`(positions, count) -> positions after so many moves without a search, and what a search reads of them`."""
    positions: PyTree[Array]


def graph_of(network: str, num_games: int, simulations: int, moves: int) -> Graph:
    return rollmill.alphazero(
        ENVIRONMENT,
        num_envs=num_games,
        num_steps=moves,
        total_timesteps=num_games * moves,
        num_minibatches=1,
        num_simulations=simulations,
        max_considered_actions=CONSIDERED,
        gumbel_scale=GUMBEL_SCALE,
        network=NETWORKS[network],
    )


def predict_of(graph: Graph) -> Callable[..., tuple[Float[Array, "E A"], Float[Array, " E"]]]:
    """`(weights, observations, legal actions) -> logits, values`, for a batch; the network of both sides."""
    policy: Any = graph.policy
    planner = policy.function.args[0]
    return jax.vmap(lambda weights, *shown: planner.predict(weights.network, *shown), in_axes=(None, 0, 0))


def rollmill_side(graph: Graph, moves: int) -> Side:
    """Self-play as a training of Rollmill collects it."""
    env = connect_four()
    legal = env.action_mask
    assert legal is not None
    num_games = graph.loops.num_envs
    state = jax.jit(partial(init_state, graph))(jax.random.key(0), jnp.arange(num_games, dtype=jnp.int32))

    def play(weights: PyTree, games: PyTree, key: Key) -> tuple[PyTree, PyTree]:
        def move(games: PyTree, t: Int[Array, ""]) -> tuple[PyTree, PyTree]:
            return step_all(graph, weights, games, key, t)

        return jax.lax.scan(move, games, jnp.arange(moves))

    def step(state: PyTree, action: Int[Array, ""]) -> tuple[PyTree, PyTree, Bool[Array, " A"]]:
        timestep = env.step(jax.random.key(0), state, action, env.params)
        shown = timestep.observation, timestep.reward, timestep.terminated
        return timestep.state, shown, legal(timestep.state, env.params)

    _, position = env.reset(jax.random.key(0), env.params)
    positions = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (num_games, *leaf.shape)), position)
    return Side(play, state.collector, partial(steps_in_a_row, step), positions)


def pgx_side(graph: Graph, simulations: int, moves: int) -> Side:
    """Self-play by Pgx's environment and the search of mctx."""
    mctx, pgx, wrappers = map(importlib.import_module, ("mctx", "pgx", "pgx.experimental"))
    env = pgx.make("connect_four")
    num_games, predict = graph.loops.num_envs, predict_of(graph)
    shown = lambda state: (state.observation.astype(jnp.float32), state.legal_action_mask)
    evaluate = lambda weights, state: predict(weights, *shown(state))

    def simulate(weights: PyTree, key: Key, action: Int[Array, " E"], before: Any) -> tuple[Any, Any]:
        state = jax.vmap(env.step)(before, action)
        logits, value = evaluate(weights, state)
        output = mctx.RecurrentFnOutput(
            reward=reward_of_mover(before, state),
            discount=jnp.where(state.terminated, 0.0, -1.0),
            prior_logits=logits,
            value=jnp.where(state.terminated, 0.0, value),
        )
        return output, state

    values = {"value_scale": VALUE_SCALE, "rescale_values": RESCALE_VALUES}
    search = partial(
        mctx.gumbel_muzero_policy,
        recurrent_fn=simulate,
        num_simulations=simulations,
        max_num_considered_actions=CONSIDERED,
        gumbel_scale=GUMBEL_SCALE,
        qtransform=partial(mctx.qtransform_completed_by_mix_value, **values),
    )

    def play(weights: PyTree, games: Any, key: Key) -> tuple[Any, PyTree]:
        def move(before: Any, key: Key) -> tuple[Any, PyTree]:
            search_key, step_key = jax.random.split(key)
            logits, value = evaluate(weights, before)
            # Auto-reset leaves the flag of the last game on the first position of the next; a search from there
            # would find all moves without effect.
            position = before.replace(terminated=jnp.zeros_like(before.terminated))
            root = mctx.RootFnOutput(prior_logits=logits, value=value, embedding=position)
            found = search(weights, search_key, root, invalid_actions=~before.legal_action_mask)
            keys = jax.random.split(step_key, num_games)
            state = jax.vmap(wrappers.auto_reset(env.step, env.init))(before, found.action, keys)
            stored = before.observation, found.action_weights, reward_of_mover(before, state), state.terminated
            return state, stored

        return jax.lax.scan(move, games, jax.random.split(key, moves))

    def step(state: Any, action: Int[Array, ""]) -> tuple[Any, PyTree, Bool[Array, " A"]]:
        state = env.step(state, action)
        return state, (state.observation, state.rewards, state.terminated), state.legal_action_mask

    games = jax.jit(jax.vmap(env.init))(jax.random.split(jax.random.key(0), num_games))
    return Side(play, games, partial(steps_in_a_row, step), games)


def reward_of_mover(before: Any, after: Any) -> Float[Array, " E"]:
    """Returns the reward of the player who has moved."""
    return jnp.take_along_axis(after.rewards, before.current_player[:, None], axis=1)[:, 0]


def steps_in_a_row(step: Function, positions: PyTree, count: int) -> PyTree:
    """Makes `count` moves in every game, each in the first column that is not full, also after its end.

    All that a search reads of a position is carried along, so that none of it is left out.
    """
    one = jax.vmap(step)
    first = one(positions, jnp.zeros(jax.tree.leaves(positions)[0].shape[0], jnp.int32))

    def again(now: PyTree, _: None) -> tuple[PyTree, None]:
        state, _, legal = now
        return one(state, jnp.argmax(legal, axis=-1).astype(jnp.int32)), None

    return jax.lax.scan(again, first, length=count - 1)[0]


def evaluations_in_a_row(
    predict: Function, count: int, weights: PyTree, observation: Float[Array, "E 6 7 2"]
) -> Float[Array, "E 6 7 2"]:
    """Evaluates a batch `count` times, each time on observations that follow from the outputs before."""
    legal = jnp.ones((observation.shape[0], 7), bool)

    def again(observation: Float[Array, "E 6 7 2"], _: None) -> tuple[Float[Array, "E 6 7 2"], None]:
        logits, value = predict(weights, observation, legal)
        change = 1e-3 * jnp.tanh(value + jnp.sum(logits, axis=-1))
        return observation + change[:, None, None, None], None

    return jax.lax.scan(again, observation, length=count)[0]


def compiled_alone(name: str, function: Function, arguments: tuple) -> tuple[Function, float]:
    """Compiles the function for these arguments; returns it with the seconds from trace to program."""
    began = time.perf_counter()
    found = jax.jit(function).lower(*arguments).compile()
    seconds = time.perf_counter() - began
    print(f"{seconds:.1f} s to compile {name}", flush=True)
    return found, seconds


def seconds_of(function: Function, *arguments: Any) -> tuple[Any, float]:
    """Returns the results of a call, and its seconds."""
    began = time.perf_counter()
    found = jax.block_until_ready(function(*arguments))
    return found, time.perf_counter() - began


def play_in_turns(
    plays: Mapping[str, Function], games: Mapping[str, PyTree], weights: PyTree, repeats: int
) -> dict[str, list[float]]:
    """Returns the seconds of the calls of each side; each call continues the games of its side's last."""
    now = dict(games)
    keys = {name: iter(jax.random.split(jax.random.key(1), repeats + 1)) for name in plays}

    def turn(name: str) -> float:
        (now[name], _), seconds = seconds_of(plays[name], weights, now[name], next(keys[name]))
        return seconds

    return in_turns({name: partial(turn, name) for name in plays}, repeats, warm_up=1)


def parts_of_a_move(
    graph: Graph, sides: Mapping[str, Side], weights: PyTree, *, simulations: int, chosen: Any
) -> dict[str, dict]:
    """Returns the seconds of the network alone and of each side's environment alone, in one move of all games."""
    # A search evaluates its root and a position in each simulation; the environment makes the move in the end.
    count = (simulations + 1) * chosen.moves
    observation = jnp.zeros((graph.loops.num_envs, 6, 7, 2), jnp.float32)
    network = partial(evaluations_in_a_row, predict_of(graph), count)
    tasks: dict[str, tuple[Function, tuple]] = {"network": (network, (weights, observation))}
    for name, side in sides.items():
        tasks[environment_of(name)] = partial(side.steps, count=count), (side.positions,)
    ready = {name: (compiled_alone(name, *task)[0], task[1]) for name, task in tasks.items()}
    sides_alone = {
        name: lambda f=function, a=arguments: seconds_of(f, *a)[1] for name, (function, arguments) in ready.items()
    }
    turns = in_turns(sides_alone, chosen.repeats, warm_up=1)
    return {name: spread([each / chosen.moves for each in seconds]) for name, seconds in turns.items()}


def environment_of(name: str) -> str:
    return f"environment of {name}"


def measure(network: str, num_games: int, simulations: int, chosen: Any) -> dict[str, Any]:
    """Returns the moves a second of both sides, and the parts of their seconds."""
    moves, what = chosen.moves, f"{network}, {num_games} games, {simulations} simulations"
    graph = graph_of(network, num_games, simulations, moves)
    weights = jax.jit(lambda key: graph.weights(graph.start_learner(key)))(jax.random.key(0))
    sides = {ROLLMILL: rollmill_side(graph, moves)}
    if chosen.only is None:
        sides[PGX] = pgx_side(graph, simulations, moves)
    plays, compile_seconds = {}, {}
    for name, side in sides.items():
        arguments = weights, side.games, jax.random.key(0)
        plays[name], compile_seconds[name] = compiled_alone(f"{name}: {what}", side.play, arguments)
    seconds = play_in_turns(plays, {name: side.games for name, side in sides.items()}, weights, chosen.repeats)
    parts = parts_of_a_move(graph, sides, weights, simulations=simulations, chosen=chosen)
    result: dict[str, Any] = {"network": network, "games": num_games, "simulations": simulations, "parts": parts}
    for name, times in seconds.items():
        rates, shares = (
            spread([num_games * moves / s for s in times]),
            shares_of(name, median(times) / moves, parts),
        )
        each = {"compile_seconds": compile_seconds[name], "seconds_of_a_move_of_all_games": shares}
        result[name] = {"moves_per_second": rates, **each}
        said = ", ".join(f"{part} {1e3 * seconds:.2f}" for part, seconds in shares.items())
        print(f"{what}: {name} {rates['median']:,.0f} moves/s; ms of a move of all games: {said}", flush=True)
    if chosen.only is None:
        ours, theirs = seconds[ROLLMILL], seconds[PGX]
        result["over_pgx"] = spread([their / our for our, their in zip(ours, theirs, strict=True)])
        result["ratio_of_medians"] = median(theirs) / median(ours)
        print(f"{what}: {result['over_pgx']['median']:.2f} x pgx", flush=True)
    return result


def shares_of(name: str, whole: float, parts: Mapping[str, dict]) -> dict[str, float]:
    """Returns the medians of a move and its parts; the rest is that of the tree, and of all that is not measured
    alone.
    """
    network, environment = parts["network"]["median"], parts[environment_of(name)]["median"]
    return {"whole": whole, "network": network, "environment": environment, "rest": whole - network - environment}


def packages() -> dict[str, str | None]:
    """Returns the versions of the other side's packages; None where they are not installed."""
    found: dict[str, str | None] = dict.fromkeys(("pgx", "mctx"))
    for name in found:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def main() -> None:
    keep_freed_memory()  # as trainings do; both sides have it
    machine, found = platform(), []
    chosen = options(
        __doc__,
        network=some_of(NETWORKS, ["mlp"]),
        games=GAMES[machine],
        simulations=[32, 128],
        moves=(4, "moves of each game in a call"),
        repeats=15,
        only=(one_of(ROLLMILL), "leave Pgx out, which need not be installed then"),
    )
    for case in itertools.product(chosen.network, chosen.games, chosen.simulations):
        found.append(measure(*case, chosen))
        result = {"moves": chosen.moves, "packages": packages(), "self_play": found}
        write_result(f"self-play-{machine}", result, chosen.output)


if __name__ == "__main__":
    main()
