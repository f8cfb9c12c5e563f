"""A server and its clients: answers by value, one error for each bad request, overload, stopping."""

import asyncio
import json
import threading
import time
from unittest.mock import Mock

import jax
import numpy as np
import pytest
from serving_load import Shot, drive, malformed_shots, mixed, post

import rollmill
from rollmill.policies.loading import load_weights
from rollmill.serving import BatchedPolicy
from wordings import raises

from .conftest import answers, serving, train

ZEROS = [0.0, 0.0, 0.0, 0.0]
GOOD = json.dumps({"observation": ZEROS})


def observations(count, seed=0):
    return np.random.default_rng(seed).normal(size=(count, 4)).round(3).tolist()


def expected(run, seen):
    policy = rollmill.load(run)
    return [policy(observation).tolist() for observation in seen]


def test_actions_are_those_of_the_loaded_policy(cartpole):
    seen = observations(13)
    actions = expected(cartpole, seen)
    assert set(actions) == {0, 1}
    with serving(cartpole) as server:
        alone = [server.ask("/act", {"observation": one}) for one in seen]
        together = server.ask("/act", {"observations": seen[:8]})
        metrics = server.ask("/metrics")[1]
    assert alone == [(200, {"action": action}) for action in actions]
    assert together == (200, {"actions": actions[:8]})
    assert metrics["decisions"] == 21 and metrics["batches"] == 14 and metrics["largest_batch"] == 8


@pytest.mark.slow
def test_continuous_actions_lie_inside_the_bounds(tmp_path):
    network = rollmill.NetworkConfig(initial_log_std=3.0)
    run = train(tmp_path, "Pendulum-v1", network=network)
    seen = np.random.default_rng(1).normal(size=(8, 3)).tolist()
    with serving(run) as server:
        greedy = server.ask("/act", {"observations": seen})[1]["actions"]
    np.testing.assert_allclose(greedy, expected(run, seen), atol=1e-5)
    with serving(run, stochastic=True) as server:
        drawn = [server.ask("/act", {"observation": seen[0]})[1]["action"] for _ in range(30)]
    assert np.abs(drawn).max() == 2.0 and len(np.unique(drawn)) > 2


def test_a_description_and_health(cartpole):
    with serving(cartpole, max_batch=4, max_wait=0.001) as server:
        status, told = server.ask("/")
        assert status == 200 and told["environment"] == "CartPole-v1" and told["algorithm"] == "ppo"
        assert told["observation"] == {"shape": [4], "dtype": "float32"} and told["action_mask"] is None
        assert told["max_batch"] == 4 and told["max_wait_ms"] == 1.0 and not told["recurrent"]
        assert server.ask("/health") == (200, {"status": "ready"})


def test_many_requests_with_bad_ones_among_them_lose_nothing(cartpole):
    check_load(cartpole, 600, share=0.2, connections=16)


@pytest.mark.slow
def test_ten_thousand_requests_with_bad_ones_among_them_lose_nothing(cartpole):
    check_load(cartpole, 10_000, share=0.05, connections=64)


def check_load(run, count, *, share, connections):
    seen = observations(20)
    actions = expected(run, seen)
    bodies = [json.dumps({"observation": one}) for one in seen]
    shots = mixed(bodies, count, share=share)
    with serving(run) as server:
        outcomes = asyncio.run(drive(server.port, iter(shots), connections=connections, limit=240))
        metrics = server.ask("/metrics")[1]
    assert len(outcomes) == count
    assert {shot.kind for shot in malformed_shots(GOOD)} <= {outcome.shot.kind for outcome in outcomes}
    for outcome in outcomes:
        assert outcome.status in outcome.shot.statuses, outcome
        told = json.loads(outcome.body)
        if outcome.shot.kind == "good":
            assert told == {"action": actions[outcome.shot.number]}
        else:
            assert list(told) == ["error"] and len(told["error"]) > 10
    assert metrics["decisions"] == round(count * (1 - share)) and metrics["errors"] == round(count * share)


def test_pipelined_requests_are_answered_in_their_order(cartpole):
    seen = observations(100, seed=3)
    actions = expected(cartpole, seen)
    bodies = [post(json.dumps({"observation": one})) for one in seen]
    with serving(cartpole, max_batch=4, pipelined=3) as server, server.connect() as client:
        for body in [*bodies[:50], post("{}"), *bodies[50:]]:
            client.sendall(body)
        found = answers(client, 101)
    assert [status for status, _ in found] == [200] * 50 + [400] + [200] * 50
    assert [told["action"] for status, told in found if status == 200] == actions


def test_very_many_pipelined_requests_that_are_answered_at_once(cartpole):
    with serving(cartpole) as server, server.connect() as client:
        client.sendall(b"GET /health HTTP/1.1\r\n\r\n" * 2000)
        found = answers(client, 2000)
        metrics = server.ask("/metrics")[1]
    assert [status for status, _ in found] == [200] * 2000
    assert metrics["answers"]["200"] >= 2000 and "500" not in metrics["answers"]


def test_a_request_may_come_byte_by_byte_or_in_chunks(cartpole):
    body = GOOD.encode()
    chunked = b"POST /act HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n%x\r\n%s\r\n0\r\n\r\n" % (
        *(5, body[:5]),
        *(len(body) - 5, body[5:]),
    )
    with serving(cartpole) as server, server.connect() as client:
        for byte in post(GOOD):
            client.sendall(bytes([byte]))
        client.sendall(chunked)
        client.sendall(b"POST /act HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(body))
        found = answers(client, 3)
        client.sendall(body)
        found += answers(client, 1)
    assert [status for status, _ in found] == [200, 200, 100, 200]


def test_slow_clients_are_told_and_silent_ones_closed_while_others_are_served(cartpole):
    with (
        serving(cartpole, receive_seconds=0.8, idle_seconds=1.6) as server,
        server.connect() as slow,
        server.connect() as silent,
    ):
        began = time.monotonic()
        slow.sendall(b"POST /act HTTP/1.1\r\n")
        found = None
        while found is None and time.monotonic() - began < 10:
            slow.sendall(b"Name: value\r\n")
            assert server.ask("/act", {"observation": ZEROS})[0] == 200
            slow.settimeout(0.05)
            try:
                found = answers(slow, 1)
            except TimeoutError:
                continue
        assert found == [(408, {"error": "the request was not complete after 0.8 s."})]
        assert silent.recv(100) == b"" and 1.5 <= time.monotonic() - began < 10


def test_more_connections_than_allowed_are_told_so(cartpole):
    with serving(cartpole, connections=2) as server:
        with server.connect() as one, server.connect() as other:
            for client in (one, other):
                client.sendall(post(GOOD))
                assert answers(client, 1)[0][0] == 200
            with server.connect() as third:
                ((status, told),) = answers(third, 1)
            assert status == 503 and "the limit of 2 open connections is reached" in told["error"]
        deadline = time.monotonic() + 10
        while server.ask("/health")[0] != 200:
            assert time.monotonic() < deadline


class Held(BatchedPolicy):
    """A policy whose batches wait until `go` is set, and fail while `broken`."""

    def __init__(self, run, **options):
        super().__init__(load_weights(run), **options)
        self.go, self.broken = threading.Event(), False
        self.go.set()

    def __call__(self, rows):
        assert self.go.wait(60)
        if self.broken:
            raise RuntimeError("the device is gone")
        return super().__call__(rows)


def test_a_full_queue_refuses_and_loses_nothing(cartpole):
    policy = Held(cartpole, max_batch=2, sessions=1)
    with serving(cartpole, max_batch=2, queued=4, policy=policy) as server, server.connect() as client:
        policy.go.clear()
        client.sendall(post(GOOD))
        while server.ask("/metrics")[1]["queued"]:
            time.sleep(0.01)  # the first batch is on the device
        client.sendall(post(GOOD) * 6)
        while server.ask("/metrics")[1]["answers"].get("503", 0) < 2:
            time.sleep(0.01)
        assert server.ask("/metrics")[1]["queued"] == 4
        policy.go.set()
        found = answers(client, 7)
    assert [status for status, _ in found] == [200] * 5 + [503] * 2
    assert "4 observations are already waiting, and the limit is 4" in found[-1][1]["error"]


def test_a_failing_device_is_an_error_of_its_requests_and_then_the_end(cartpole):
    policy = Held(cartpole, max_batch=2, sessions=1)
    with serving(cartpole, max_batch=2, policy=policy) as server:
        policy.broken = True
        status, told = server.ask("/act", {"observation": ZEROS})
        assert status == 500 and told["error"].endswith("RuntimeError: the device is gone")
        policy.broken = False
        assert server.ask("/act", {"observation": ZEROS})[0] == 200
        policy.broken = True
        for _ in range(3):
            assert server.ask("/act", {"observation": ZEROS})[0] == 500
        server.thread.join(30)
    assert server.codes == [False]


def test_a_device_that_cannot_even_forget_ends_the_server_after_its_answers(cartpole, capfd):
    policy = Held(cartpole, max_batch=2, sessions=1)
    with serving(cartpole, max_batch=2, policy=policy) as server:
        policy.broken = True
        policy.reset_memories = Mock(side_effect=RuntimeError("an illegal access"))
        assert server.ask("/act", {"observation": ZEROS})[0] == 500
        server.thread.join(30)
    assert server.codes == [False] and "an illegal access" in capfd.readouterr().err


def test_requests_that_wait_do_not_outlive_the_memories_of_their_sessions(t_maze):
    policy = Held(t_maze, max_batch=1, sessions=4)
    observation = policy.observation_space.sample().tolist()
    with serving(t_maze, max_batch=1, policy=policy) as server, server.connect() as client:
        name = server.ask("/act", {"observation": observation})[1]["session"]
        policy.go.clear()
        client.sendall(post(json.dumps({"observation": observation})))
        while server.ask("/metrics")[1]["queued"]:
            time.sleep(0.01)
        client.sendall(post(json.dumps({"observation": observation, "session": name})))
        while not server.ask("/metrics")[1]["queued"]:
            time.sleep(0.01)
        policy.broken = True
        policy.go.set()
        found = answers(client, 2)
    assert [status for status, _ in found] == [500, 500]


def test_actions_that_are_not_finite_are_an_error_of_their_request_alone(tmp_path):
    run = train(tmp_path, "Pendulum-v1")
    policy = BatchedPolicy(load_weights(run), max_batch=4, sessions=1)
    compute = policy.__call__

    class Spoilt(BatchedPolicy):
        def __init__(self):
            self.__dict__ |= vars(policy)

        def __call__(self, rows):
            actions = np.array(compute(rows))
            actions[rows.observation[:, 0] > 5] = np.nan
            return actions

    with serving(run, max_batch=4, policy=Spoilt()) as server:
        assert server.ask("/act", {"observation": [0.0, 0.0, 0.0]})[0] == 200
        status, told = server.ask("/act", {"observations": [[0.0, 0.0, 0.0], [9.0, 0.0, 0.0]]})
    assert status == 500 and "not finite" in told["error"]


def test_stopping_answers_what_is_in_flight_and_refuses_the_rest(cartpole):
    policy = Held(cartpole, max_batch=2, sessions=1)
    with (
        serving(cartpole, max_batch=2, policy=policy) as server,
        server.connect() as client,
        server.connect() as late,
    ):
        policy.go.clear()
        client.sendall(post(GOOD) * 3)
        while server.ask("/metrics")[1]["requests"] < 3:
            time.sleep(0.01)
        server.stop.set()
        while server.ask("/health")[0] != 503:
            time.sleep(0.01)
        late.sendall(post(GOOD))
        ((status, told),) = answers(late, 1)
        assert status == 503 and told == {"error": "the server is stopping."}
        policy.go.set()
        assert [status for status, _ in answers(client, 4)] == [200] * 3  # the last one ends the connection
        server.thread.join(30)
    assert server.codes == [True]


def test_a_token_is_asked_for(cartpole):
    token = "0123456789abcdef"
    with serving(cartpole, token=token.encode()) as server:
        assert server.ask("/health")[0] == 401
        for wrong in ("Bearer 0123456789abcdeg", "Bearer", f"Basic {token}", token, f"Bearer {token}x"):
            status, told = server.ask("/act", {"observation": ZEROS}, headers={"Authorization": wrong})
            assert status == 401 and told["error"].startswith("this server requires its token")
        for right in (f"Bearer {token}", f"bearer {token}"):
            assert server.ask("/act", {"observation": ZEROS}, headers={"Authorization": right})[0] == 200


@pytest.mark.slow
def test_sessions_remember_as_the_loaded_policy_does(t_maze):
    space = rollmill.make("TMaze-v0").observation_space
    space.seed(0)
    seen = [[space.sample().tolist() for _ in range(6)] for _ in range(3)]
    with serving(t_maze, sessions=4) as server:
        memories = {}
        policy = rollmill.load(t_maze)
        names = [None] * 3
        for step in range(6):
            document = {"observations": [episode[step] for episode in seen]}
            status, told = server.ask("/act", document | ({"sessions": names} if step else {}))
            assert status == 200
            names = told["sessions"]
            memories[step] = told["actions"]
        for number, episode in enumerate(seen):
            policy.reset()
            assert [memories[step][number] for step in range(6)] == [policy(one).tolist() for one in episode]
        check_memory(server, t_maze, seen[0], names[0])
        assert server.ask(f"/sessions/{names[1]}", method="DELETE") == (200, {})
        status, told = server.ask("/act", {"observation": seen[1][0], "session": names[1]})
        assert status == 404 and told["error"].startswith(f"unknown session '{names[1]}'")
        assert server.ask("/act", {"observation": seen[1][0], "session": "guess"})[0] == 404
        assert server.ask("/act", {"observations": [seen[0][0]] * 3})[0] == 503  # two slots are left
        assert server.ask("/metrics")[1]["sessions"] == 2
        assert server.ask("/act", {"observations": [seen[0][0]] * 2})[0] == 200


def check_memory(server, run, episode, name):
    """The memory on the device after an episode, and after another that begins with `restart`."""
    policy = rollmill.load(run)
    for index, one in enumerate(episode):
        policy(one)
        server.ask("/act", {"observation": one, "session": name, "restart": index == 0})
    assert is_held(policy.memory, server)


def is_held(memory, server):
    """True if a row of the memories on the device is this one, and not empty."""
    wanted, held = jax.device_get((jax.tree.leaves(memory), jax.tree.leaves(server.policy._memories)))
    close = [np.isclose(rows, row, atol=1e-6).all(axis=-1) for rows, row in zip(held, wanted, strict=True)]
    return bool(np.any(wanted[0])) and bool(np.all(close, axis=0).any())


@pytest.mark.slow
def test_requests_of_one_session_are_computed_one_after_the_other(t_maze):
    space = rollmill.make("TMaze-v0").observation_space
    space.seed(1)
    episode = [space.sample().tolist() for _ in range(8)]
    policy = rollmill.load(t_maze)
    with serving(t_maze) as server, server.connect() as client:
        name = server.ask("/act", {"observation": episode[0]})[1]["session"]
        bodies = [json.dumps({"observation": one, "session": name}) for one in episode[1:]]
        client.sendall(b"".join(post(body) for body in bodies))
        found = [told["action"] for _, told in answers(client, 7)]
        batches = server.ask("/metrics")[1]["batches"]
        assert [policy(one).tolist() for one in episode][1:] == found and batches == 8
        assert is_held(policy.memory, server)


@pytest.mark.slow
def test_a_search_is_refused_and_its_network_alone_is_served_with_legal_actions(tmp_path):
    small = {"num_envs": 4, "num_steps": 4, "num_minibatches": 1, "total_timesteps": 16}
    network = rollmill.NetworkConfig(hidden_sizes=(8,), shared_torso=True)
    paths = {}
    for simulations in (0, 4):
        graph = rollmill.alphazero("TicTacToe-v0", num_simulations=simulations, network=network, **small)
        paths[simulations] = tmp_path / str(simulations)
        rollmill.train(graph, run_dir=paths[simulations], quiet=True, tensorboard=False)
    with raises("this-policy-cannot-be-served"):
        BatchedPolicy(load_weights(paths[4]), max_batch=1, sessions=1)
    board = np.zeros(rollmill.make("TicTacToe-v0").observation_space.shape).tolist()
    with serving(paths[0]) as server:
        assert server.ask("/")[1]["action_mask"] == {"shape": [9], "dtype": "bool"}
        for action in range(9):
            legal = [index == action for index in range(9)]
            assert server.ask("/act", {"observation": board, "action_mask": legal}) == (200, {"action": action})


def test_lost_requests_are_noticed(cartpole):
    """The load's own check: a request that is not answered counts as lost."""
    with serving(cartpole) as server:
        shots = [Shot(b"POST /act HTTP/1.1\r\nContent-Length: 9\r\n\r\n"), Shot(post(GOOD))]
        outcomes = asyncio.run(drive(server.port, iter(shots), connections=1, limit=0.5))
    assert [outcome.status for outcome in outcomes] == [0]
