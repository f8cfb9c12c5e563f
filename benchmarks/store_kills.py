"""Kills trainings whose runs are in an object store that is slow and fails, and compares what they learn.

    python benchmarks/store_kills.py --kills 50 --minutes 20
    python benchmarks/store_kills.py --kills 50 --minutes 20 --add

PPO trains on CartPole, tiny, with `--run-dir s3://... --resume-if-exists`. The store is moto's behind faults:
each request waits up to 0.2 s, and a third of them fail, before or after they had an effect, or in the middle of
the answer. A training is killed with SIGKILL at random moments and started again by the same command, half of the
times as on another machine: the working folder is deleted, so that the store has all that is left. Nothing may be
lost: a start goes on from the newest checkpoint that was whole on its machine or in the store, when it was killed.
At the end the store has all lines of the metrics and the final checkpoint, and the weights are those of an
undisturbed training.
Trainings import modules when they need them: run it in a copy of the sources if those change meanwhile.
Needs moto[s3], flask and flask-cors.
"""

import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any

from kills import Training, preload, variables
from measure import count_lines, options, read_result, this_commit, words, write_result

ITERATIONS, EVERY, START_SECONDS = 20_000, 100, 10.0
SLOW_SECONDS = 1200.0
"""How long a training may take to resume, and then to end, on a busy machine with a store that fails."""
MAX_DELAY, FAILING = 0.2, 1 / 3
TRAIN = (
    "train ppo CartPole-v1 --num-envs 4 --num-steps 4 --num-minibatches 1 --network.hidden-sizes 8 --fusion off"
)
RECORDED = f"--resume-if-exists --checkpoint-iterations {EVERY} --no-tensorboard --log-every 1"
KEYS = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_REGION": "us-east-1"}


class Faults:
    """A WSGI application that is slow and fails at times."""

    def __init__(self, application: Any, seed: int) -> None:
        self._application, self._rng = application, random.Random(seed)

    def __call__(self, environ: dict, start_response: Any) -> Any:
        time.sleep(self._rng.uniform(0, MAX_DELAY))
        fate = self._rng.random()
        if fate > FAILING:
            return self._application(environ, start_response)
        if fate > FAILING * 2 / 3:
            return self._refused(start_response)
        answer = b"".join(self._application(environ, lambda *arguments: None))
        if fate > FAILING / 3:  # it had its effect, and nobody learns of it
            return self._refused(start_response)
        start_response("200 OK", [("Content-Length", str(len(answer) + 100))])
        return [answer[: len(answer) // 2]]

    def _refused(self, start_response: Any) -> list[bytes]:
        start_response("503 Slow Down", [("Content-Type", "application/xml")])
        return [b"<Error><Code>SlowDown</Code><Message>Reduce your request rate.</Message></Error>"]


def serve(seed: int, ports: Any) -> None:
    """Serves one store at two ports: the first is sound, the second one has faults."""
    import logging
    from threading import Thread

    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.CRITICAL)
    sound = DomainDispatcherApplication(create_backend_app)
    servers = [make_server("127.0.0.1", 0, each, threaded=True) for each in (sound, Faults(sound, seed))]
    for server in servers:
        Thread(target=server.serve_forever).start()
    ports.put([server.server_port for server in servers])


class Case:
    """The training, with a run of a store or of a folder."""

    def command(self, run: Path) -> list[str]:
        return words(f"{TRAIN} {RECORDED}", total_timesteps=ITERATIONS * 16, run_dir=self.place(run))

    def place(self, run: Path) -> Any:
        return run


class Stored(Case):
    """The same in the store."""

    def place(self, run: Path) -> str:
        return f"s3://bucket/{run.name}"


def stored_iterations(sound: str, run: Path) -> set[int]:
    """Returns the checkpoints that are whole in the store, past its faults."""
    client = import_module("boto3").client(
        "s3", endpoint_url=sound, region_name=KEYS["AWS_REGION"], **_boto_keys()
    )
    listed = client.list_objects_v2(Bucket="bucket", Prefix=f"{run.name}/").get("Contents", [])
    names = (each["Key"] for each in listed)
    return {int(found[1]) for name in names if (found := re.search(r"/checkpoints/(\d+)/record.json$", name))}


def _boto_keys() -> dict[str, str]:
    return {"aws_access_key_id": KEYS["AWS_ACCESS_KEY_ID"], "aws_secret_access_key": KEYS["AWS_SECRET_ACCESS_KEY"]}


def working_folder(run: Path) -> Path:
    """Returns the folder of this machine in which the run is trained."""
    return Path(os.environ["ROLLMILL_CACHE_DIR"], "stored_runs/s3/bucket", run.name)


def local_iterations(run: Path) -> set[int]:
    folder = working_folder(run) / "checkpoints"
    return {int(entry.name) for entry in folder.glob("*") if entry.name.isdecimal()}


def endure(run: Path, kills: int, seed: int, sound: str) -> dict:
    """Trains to the end while it is killed so many times, and returns the outcome."""
    rng, killed, faults, began = random.Random(seed), [], [], time.monotonic()
    moments = sorted(rng.uniform(0, ITERATIONS) for _ in range(kills))
    preload()
    training = Training(Stored(), run)
    for moment in moments:
        await_moment(training, run, moment, rng)
        if training.code() is not None:
            break
        os.kill(training.pid, signal.SIGKILL)
        training.wait()
        there, here = stored_iterations(sound, run), local_iterations(run)
        moves = rng.random() < 0.5
        if moves:
            shutil.rmtree(working_folder(run), ignore_errors=True)
        killed.append({"stored": max(there, default=None), "local": max(here, default=None), "moves": moves})
        training = Training(Stored(), run)
        least = max(there | (set() if moves else here), default=None)
        if least is not None and not _resumes(training, least):
            faults.append(f"after {killed[-1]}: {training.said()[-500:]}")
    if not training.wait(seconds=SLOW_SECONDS):
        faults.append(f"it hangs: {training.said()[-800:]}")
        os.kill(training.pid, signal.SIGKILL)
        training.wait()
    if training.code() != 0:
        faults.append(f"exit code {training.code()}: {training.said()[-800:]}")
    shutil.rmtree(working_folder(run), ignore_errors=True)
    outcome = {"weights": None, "faults": []} if faults else examined(run, sound)
    return {**outcome, "seed": seed, "killed": killed, "faults": faults + outcome["faults"],
            "seconds": round(time.monotonic() - began, 1)}  # fmt: skip


def await_moment(training: Training, run: Path, iteration: float, rng: random.Random) -> None:
    """Waits for a random moment: of the start-up, or after an iteration."""
    if rng.random() < 0.25:
        training.wait(seconds=rng.uniform(0, START_SECONDS))
        return
    training.wait(lambda: count_lines(working_folder(run)) >= iteration)
    training.wait(seconds=rng.uniform(0, 0.5))


def _resumes(training: Training, least: int) -> bool:
    """Returns whether a training goes on from a checkpoint that is at least so new."""
    resumed = lambda: re.search(r"resumed from iteration (\d+)|finished already", training.said())
    training.wait(resumed, seconds=SLOW_SECONDS)
    found = resumed()
    return found is not None and (found[1] is None or int(found[1]) >= least)


def examined(run: Path, sound: str) -> dict:
    """Reads the run from the store on a new machine, and returns its weights and what it lacks."""
    from rollmill.core.stored_paths import run_folder
    from rollmill.record.checkpoints import Checkpoints
    from rollmill.record.run_directory import RunDirectory

    failing, os.environ["AWS_ENDPOINT_URL"] = os.environ["AWS_ENDPOINT_URL"], sound
    try:
        brought = RunDirectory.open(run_folder("run", f"s3://bucket/{run.name}"))
    finally:
        os.environ["AWS_ENDPOINT_URL"] = failing
    lines = [json.loads(line)["iteration"] for line in brought.metrics_file.read_text().splitlines()]
    faults = [] if lines == list(range(1, ITERATIONS + 1)) else [f"{len(lines)} lines of metrics"]
    with Checkpoints(brought.checkpoints, read_only=True) as checkpoints:
        newest = checkpoints.iterations()[-1]
        if newest != ITERATIONS or (damage := checkpoints.check(newest)):
            faults.append(f"checkpoint {newest} is the newest, damage: {damage if newest == ITERATIONS else ''}")
    return {"weights": (brought.read_summary() or {}).get("weights_sha256"), "faults": faults}


def undisturbed(run: Path) -> str:
    training = Training(Case(), run)
    training.wait(seconds=SLOW_SECONDS)
    return json.loads((run / "summary.json").read_text())["weights_sha256"]


def counted(done: list[dict]) -> dict:
    """Returns the counts of all trainings, and each of them."""
    killed = [kill for training in done for kill in training["killed"]]
    return {
        "kills": len(killed),
        "on_another_machine": sum(kill["moves"] for kill in killed),
        "with_checkpoints_that_the_store_lacked": sum(
            kill["local"] is not None and kill["local"] > (-1 if kill["stored"] is None else kill["stored"])
            for kill in killed
        ),
        "trainings": len(done),
        "equal": sum(training["equal"] for training in done),
        "faults": [fault for training in done for fault in training["faults"]],
        "each": done,
    }


def main() -> None:
    chosen = options(
        __doc__,
        kills=(50, "kills in all"),
        each=(5, "limit of one training"),
        minutes=(20.0, "no training begins after this time"),
        seed=0,
        add=(False, "keep the trainings that are in the result"),
    )
    done = read_result("store-kills", chosen.output).get("each", []) if chosen.add else []
    deadline = time.monotonic() + 60 * chosen.minutes
    context = multiprocessing.get_context("spawn")
    ports = context.Queue()
    server = context.Process(target=serve, args=(chosen.seed, ports), daemon=True)
    server.start()
    sound, failing = (f"http://127.0.0.1:{port}" for port in ports.get())
    with tempfile.TemporaryDirectory() as folder:
        own = {"AWS_ENDPOINT_URL": failing, "ROLLMILL_CACHE_DIR": f"{folder}/rollmill"}
        os.environ |= KEYS | variables(folder) | own
        boto3 = import_module("boto3")
        boto3.client("s3", endpoint_url=sound, region_name=KEYS["AWS_REGION"], **_boto_keys()).create_bucket(
            Bucket="bucket"
        )
        preload()
        right = undisturbed(Path(folder, "undisturbed"))
        while (left := chosen.kills - counted(done)["kills"]) > 0 and time.monotonic() < deadline:
            seed = chosen.seed + len(done) + 1
            with ProcessPoolExecutor(1, mp_context=context) as pool:
                # In a new process: neither obstore's threads nor JAX's may be there when a training is forked.
                arguments = Path(folder, f"run{seed}"), min(chosen.each, left), seed, sound
                training = pool.submit(endure, *arguments).result()
            training |= {"equal": training["weights"] == right, "commit": this_commit()}
            done.append(training)
            print(json.dumps(training), flush=True)
            write_result("store-kills", counted(done), chosen.output)
    server.kill()
    sys.exit(1 if counted(done)["faults"] or counted(done)["equal"] < len(done) else 0)


if __name__ == "__main__":
    main()
