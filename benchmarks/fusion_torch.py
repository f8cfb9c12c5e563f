"""Data collection with PyTorch, for `fusion.py`: one operation a kernel, in CUDA graphs, and compiled.

Every step of all environments is a row of tensors of its own; a trajectory is a list of rows, which spares PyTorch
a copy. Random numbers are PyTorch's own. Shape letter: `E` environments.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any, NamedTuple

import torch
from fusion_simulators import Simulator, TorchSimulator


class Now(NamedTuple):
    """All environments between two steps."""

    state: tuple
    elapsed: torch.Tensor
    """Steps of the running episode; int32 `[E]`."""


class Row(NamedTuple):
    """Tensors that a step adds to the trajectory."""

    observation: tuple
    """Before the step."""
    action: torch.Tensor
    reward: torch.Tensor
    terminated: torch.Tensor
    truncated: torch.Tensor


Chunk = Callable[[Now], tuple[Now, list[Row]]]
"""Some steps of all environments."""


def begin(simulator: TorchSimulator, num_envs: int, device: str) -> Now:
    """Returns environments before their first step, without views, which the compiler would treat differently."""
    state = tuple(x.clone() for x in simulator.start(num_envs))
    return Now(state, torch.zeros(num_envs, dtype=torch.int32, device=device))


def one_step(simulator: TorchSimulator, now: Now) -> tuple[Now, Row]:
    """Takes a random action in every environment, and starts a new episode where one ended."""
    action = torch.randint(0, 2, now.elapsed.shape, dtype=torch.int32, device=now.elapsed.device)
    moved, reward, terminated = simulator.advance(now.state, action)
    elapsed = now.elapsed + 1
    truncated = elapsed >= simulator.max_steps
    done = terminated | truncated
    fresh = simulator.start(now.elapsed.shape[0])
    state = tuple(
        torch.where(done if x.ndim == 1 else done[:, None], new, x) for new, x in zip(fresh, moved, strict=True)
    )
    row = Row(simulator.observe(now.state), action, reward, terminated, truncated)
    return Now(state, torch.where(done, 0, elapsed)), row


def steps(simulator: TorchSimulator, count: int, now: Now) -> tuple[Now, list[Row]]:
    """Takes `count` steps in a loop of Python, which a compiler unrolls."""
    rows = []
    for _ in range(count):
        now, row = one_step(simulator, now)
        rows.append(row)
    return now, rows


@functools.lru_cache(maxsize=64)
def compiled_steps(make: Callable[[str], TorchSimulator], device: str, count: int) -> Chunk:
    """Returns `count` steps as one compiled function, for any number of environments from 2 on."""
    simulator = make(device)

    def chunk(now: Now) -> tuple[Now, list[Row]]:
        return steps(simulator, count, now)

    # code of its own, since the compiler keeps a few versions of the same code, no more
    code = chunk.__code__.replace(co_name=f"steps_{compiled_steps.cache_info().misses}")
    own = FunctionType(code, globals(), closure=chunk.__closure__)
    return torch.compile(own, dynamic=True, fullgraph=True)


def chunk_of(simulator: Simulator, device: str, count: int, *, compiled: bool) -> Chunk:
    """Returns `count` steps, compiled or not."""
    if compiled:
        return compiled_steps(simulator.to_torch, device, count)
    return functools.partial(steps, simulator.to_torch(device), count)


def called(chunk: Chunk, now: Now, chunks: int) -> Callable[[], list[Row]]:
    """Returns a rollout of `chunks` calls, which continues where the last one ended."""
    held = [now]

    def rollout() -> list[Row]:
        trajectory: list[Row] = []
        for _ in range(chunks):
            held[0], rows = chunk(held[0])
            trajectory += rows
        return trajectory

    return rollout


def replayed(chunk: Chunk, now: Now, chunks: int) -> Callable[[], list[Row]]:
    """Returns a rollout of `chunks` CUDA graphs, each with the tensors of its own rows; a rollout overwrites the
    last one.

    The graphs are replayed in the order in which they were captured, which lets them share memory.
    """
    torch.cuda.synchronize()
    aside, pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
    graphs, trajectory = [], []
    with torch.cuda.stream(aside):
        for _ in range(3):
            chunk(now)
        torch.cuda.synchronize()
        # the first row must not share its memory with what the last graph writes
        first = Now(tuple(x.clone() for x in now.state), now.elapsed.clone())
        current = first
        for n in range(chunks):
            with _captured(pool) as graph:
                if n == 0:
                    _copy(now, first)
                current, rows = chunk(current)
                if n == chunks - 1:
                    _copy(current, now)
            graphs.append(graph)
            trajectory += rows
    torch.cuda.synchronize()
    written = chunk, now, first  # graphs know addresses alone; what lies there must live as long as they do

    def rollout(written: Any = written) -> list[Row]:
        for graph in graphs:
            graph.replay()
        return trajectory

    return rollout


@contextlib.contextmanager
def _captured(pool: Any) -> Iterator[torch.cuda.CUDAGraph]:
    """Captures as `torch.cuda.graph` does, without its garbage collection and emptied caches."""
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
    try:
        yield graph
    except BaseException:
        with contextlib.suppress(RuntimeError):  # a capture that failed cannot end well
            graph.capture_end()
        raise
    graph.capture_end()


def _copy(source: Now, target: Now) -> None:
    for mine, new in zip((*target.state, target.elapsed), (*source.state, source.elapsed), strict=True):
        mine.copy_(new)


def wait(_: Any) -> None:
    """Waits until the GPU has done all its work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def ended(trajectory: list[Row]) -> float:
    """Returns the share of steps that ended an episode."""
    return float(torch.stack([(row.terminated | row.truncated).float().mean() for row in trajectory]).mean())


def kernels_generated() -> int | None:
    """Returns the number of kernels that the compiler has written so far, if known."""
    try:
        from torch._inductor import metrics

        return int(metrics.generated_kernel_count)
    except (ImportError, AttributeError):
        return None
