"""Suggests changes that would make a profiled run faster. Each rule turns a profile into one suggestion.

A rule applies only to something that takes at least a tenth of the time. Its prediction is this time multiplied by
a fraction stated in this module. The fractions are chosen so that at least half of a prediction is gained, and do
not depend on the machine. If a gain depends on something that a profile does not measure, the rule predicts
nothing and says how to measure it. For example, time saved in one of several processes may only make that process
wait longer for the others.
"""

from collections.abc import Callable
from dataclasses import replace
from math import fsum

from rollmill.core.text import number
from rollmill.profiling.breakdown import (
    category_seconds,
    duration_of,
    stepping_seconds,
    whole_time,
    working_processes,
)
from rollmill.profiling.processor_time import CoreUse
from rollmill.profiling.results import Advice, OperationTime, ProcessTime, Profile
from rollmill.profiling.text import about_percent, duration

MIN_SHARE = 0.1
"""Smallest share of the time to which a rule applies."""
FUSED = 0.5
"""Predicted saving of fusion, as a fraction of the time between the fused kernels."""
TRAFFIC_SAVED = 0.25
"""Predicted saving of fused kernels, which keep intermediate results in registers, as a fraction of the time of
memory traffic."""
PARALLEL = 0.5
"""Fraction of the possible saving that is predicted if several environments wait at the same time."""
ROOM = 2.0
"""Number of idle cores from which it is worth measuring whether more processes are faster."""
WRITTEN_LESS = 0.5
"""Predicted saving of writing files a tenth as often, as a fraction of the writing time. Part of that time does
not depend on how often files are written."""
RARER = 10
"""Factor by which files are suggested to be written less often."""
SHORT_KERNEL = 3e-6
"""Duration of a GPU kernel, in seconds, below which most of it is start and end."""
SHORT_SAVED = 0.8
"""Predicted saving of fusing short kernels, as a fraction of their time."""
ROLLOUTS_SAVED, GRADIENTS_SAVED = 0.5, 0.3
"""Predicted savings of CPU kernels, as fractions of the time of rollouts and of gradients."""
FULL_VECTORS = 32
"""Number of environments from which CPU kernels compute whole vectors. With fewer, nothing is predicted: 4 and 16
environments saved a fifth of the prediction, and nothing (benchmarks/advice.py)."""
SMALL_KERNELS = 20.0
"""Number of kernels per iteration from which fusion is worth suggesting."""
MEMORY_BOUND = 0.5
"""Share of the measured memory bandwidth from which an operation counts as limited by it."""
CACHED = 1.2
"""Share of the measured memory bandwidth above which data must have come from caches, which the compiler's count
ignores."""
COMPILING = (
    "Kernels are compiled when training begins, which takes longer than XLA, so this pays off in long runs."
)
ROLLOUT = frozenset({"environment", "policy"})
GRADIENTS = frozenset({"gradients"})
LEARNING = frozenset({"gradients", "update"})


def advise(profile: Profile) -> tuple[Advice, ...]:
    """Returns all advice for a profile, the largest predicted saving first."""
    profile = replace(profile, processes=working_processes(profile.processes))
    found = [advice for rule in RULES if (advice := rule(profile)) is not None]
    return tuple(sorted(found, key=lambda advice: -advice.saves))


def with_advice(profile: Profile) -> Profile:
    """Returns the profile with its advice added."""
    return replace(profile, advice=advise(profile))


def fuse_rollouts(profile: Profile) -> Advice | None:
    """Suggests fusion if environment and policy consist of many kernels with idle time between them."""
    if _on_cpu(profile) or not _fusion_is(profile, "off") or profile.training.possible_fusion == "off":
        return None
    return _fuse(profile, ROLLOUT, "environment and policy", f"--fusion {profile.training.possible_fusion}")


def fuse_gradients(profile: Profile) -> Advice | None:
    """Suggests full fusion if only rollouts are fused, and gradients and update consist of many kernels with idle
    time between them.
    """
    if _on_cpu(profile) or not _fusion_is(profile, "rollout") or profile.training.possible_fusion != "full":
        return None
    return _fuse(profile, LEARNING, "gradients and update", "--fusion full")


def _fuse(profile: Profile, names: frozenset[str], title: str, options: str) -> Advice | None:
    operations = _find_named(profile, names)
    kernels = fsum(operation.kernels for operation in operations)
    all_kernels = fsum(operation.kernels for operation in profile.operations)
    if kernels < SMALL_KERNELS:
        return None
    idle = whole_time(profile).idle * kernels / all_kernels
    between = fsum(operation.host for operation in operations) + idle
    computing = fsum(operation.device for operation in operations) / kernels
    counted_between = between if between / kernels >= computing / 2 else 0.0
    short = fsum(operation.device for operation in operations if _has_short_kernels(operation))
    share = whole_time(profile).share(counted_between + short)
    if share < MIN_SHARE:
        return None
    gaps = f", and {duration(between / kernels)} pass before the next one, while the device is idle"
    costly = "The time of kernels and of the gaps between them" if counted_between else "The time of kernels"
    return Advice(
        f"Fuse the kernels of {title}",
        f"An iteration starts {kernels:,.0f} kernels of {title}. One takes "
        f"{duration(computing)}{gaps if counted_between else ''}. {costly} that hardly do more than begin and "
        f"end is {about_percent(share)} of the time. A fused kernel is started only once. Predicted savings: "
        f"{about_percent(FUSED)} of the time between kernels, and {about_percent(SHORT_SAVED)} of the time of "
        f"short kernels. {COMPILING}",
        options,
        saves=_of_iteration(profile, counted_between * FUSED + short * SHORT_SAVED),
    )


def _has_short_kernels(operation: OperationTime) -> bool:
    many = operation.kernels >= SMALL_KERNELS
    return many and operation.device <= SHORT_KERNEL * operation.kernels


def fuse_on_cpu(profile: Profile) -> Advice | None:
    """Suggests CPU kernels for rollouts, or for rollouts and gradients, that XLA computes one instruction at a
    time.
    """
    if not _on_cpu(profile) or not _fusion_is(profile, "off") or profile.training.possible_fusion == "off":
        return None
    depth = profile.training.possible_fusion
    rollouts = fsum(one.device for one in _find_named(profile, ROLLOUT))
    gradients = fsum(one.device for one in _find_named(profile, GRADIENTS)) if depth == "full" else 0.0
    share = whole_time(profile).share(rollouts + gradients)
    if share < MIN_SHARE:
        return None
    what = "Environment, policy and gradients" if gradients else "Environment and policy"
    beyond = "that remains if matrix products run as fast as this machine was measured to be"
    saved = f"{about_percent(ROLLOUTS_SAVED)} of the time of environment and policy {beyond}"
    saved += f", and {about_percent(GRADIENTS_SAVED)} of the time of gradients" if gradients else ""
    is_wide = profile.training.num_envs >= FULL_VECTORS
    predicted = (
        f"Predicted: {saved}."
        if is_wide
        else ("With so few environments, only a measurement shows how much this saves.")
    )
    return Advice(
        "Fuse the instructions of a CPU",
        f"{what} take {about_percent(share)} of the time, one instruction after another, each of which reads and "
        "writes memory for all environments or samples. A kernel keeps intermediate results in registers. "
        f"{predicted} {COMPILING}",
        f"--fusion {depth}",
        saves=_of_iteration(
            profile,
            _beyond_arithmetic(profile, ROLLOUT) * ROLLOUTS_SAVED
            + (_beyond_arithmetic(profile, GRADIENTS) * GRADIENTS_SAVED if gradients else 0.0),
        )
        if is_wide
        else 0.0,
    )


def _beyond_arithmetic(profile: Profile, names: frozenset[str]) -> float:
    """Returns the seconds of operations beyond their arithmetic at the machine's measured peak."""
    operations = _find_named(profile, names)
    peak = profile.ceilings.flops_per_second if profile.ceilings is not None else 0.0
    arithmetic = fsum(one.flops for one in operations) / peak if peak > 0 else 0.0
    return max(0.0, fsum(one.device for one in operations) - arithmetic)


def add_actors(profile: Profile) -> Advice | None:
    """Suggests actors if the device waits while a single process steps host environments.

    Either the environments must wait themselves, or cores must be idle.
    """
    stepping = fsum(map(_stepping_alone, profile.processes))
    share = whole_time(profile).share(stepping)
    use, numbers = profile.cores, profile.training.possible_actors
    if share < MIN_SHARE or len(profile.processes) > 1 or use is None or not numbers:
        return None
    waiting = _waiting_in_steps(profile, use, stepping)
    if whole_time(profile).share(waiting) >= MIN_SHARE and _on_cpu(profile):
        return _wait_side_by_side(profile, use, waiting)
    if use.idle < ROOM:
        return None
    return Advice(
        "Measure whether more processes step the environments faster",
        f"For {about_percent(share)} of the time, one process steps environments on the host while the device "
        f"waits, and {number(use.idle)} cores are idle. Actors would divide the environments, but each starts "
        "the policy's programs separately and sends what it collects, and the learner shares the cores with "
        "them, so no saving is predicted. `rollmill plan ALGORITHM ENVIRONMENT --search-plan` measures it.",
        "",
        saves=0.0,
    )


def _waiting_in_steps(profile: Profile, use: CoreUse, stepping: float) -> float:
    """Returns the least seconds of an iteration in which environments wait while a core is idle."""
    iteration = profile.iteration.unprofiled
    accelerated = fsum(
        one.overlap.device_only + one.overlap.both for one in profile.processes if one.accelerators > 0
    )
    return max(0.0, min(stepping, iteration * (1.0 - use.busy) - accelerated, iteration * use.idle))


def _wait_side_by_side(profile: Profile, use: CoreUse, waiting: float) -> Advice | None:
    """Environments that wait do so at the same time in several actors, which need not have a core each."""
    iteration, cores = profile.iteration.unprofiled, use.busy + use.idle
    computing = iteration - waiting

    def lasts(actors: int) -> float:
        return waiting / actors + computing * max(1.0, actors / cores)

    actors = min(profile.training.possible_actors, key=lasts)
    saved = PARALLEL * (iteration - lasts(actors))
    if saved <= 0.0:
        return None
    return Advice(
        "Let environments wait in several processes at the same time",
        f"For {about_percent(whole_time(profile).share(waiting))} of the time, environments wait in their steps, "
        f"one after another. No core computes during that time, and {number(use.idle)} are idle. In {actors} "
        f"actors they would wait at the same time. Predicted: {about_percent(PARALLEL)} of the possible saving "
        f"if each actor computes as much as the one process does now, on {number(cores)} cores.",
        f"--distribution single-learner-coarse --actors {actors}",
        saves=saved,
    )


def _stepping_alone(process: ProcessTime) -> float:
    return min(stepping_seconds(process), process.overlap.host_only)


def wait_less(profile: Profile) -> Advice | None:
    """Suggests fewer or asynchronous workers if workers spend much of the time waiting, sending and receiving.
    Predicts no saving.
    """
    workers = profile.processes
    if len(workers) < 2 or profile.training.replicas < 2:
        return None
    lost = fsum(map(_waiting_for_workers, workers)) / len(workers)
    lasted = fsum(duration_of(worker.overlap) for worker in workers) / len(workers)
    share = lost / lasted if lasted > 0 else 0.0
    if share < MIN_SHARE:
        return None
    has_room = profile.cores is not None and profile.cores.idle >= 1.0
    goes_on = profile.training.can_be_asynchronous and has_room
    change = (
        (
            "Asynchronous actors continue with the newest available weights. Their weights are then older, which "
            "changes what is learned, and the actors take cores from the learner."
        )
        if goes_on
        else "Fewer workers wait less. They are divided better if all need the same time."
    )
    return Advice(
        "Reduce the time in which workers wait for each other",
        f"{len(workers)} workers send, receive and wait for each other with idle devices for "
        f"{about_percent(share)} of the time. {change} How much this saves depends on which worker is the last, "
        "so nothing is predicted. Profile both and compare.",
        "--asynchronous" if goes_on else "",
        saves=0.0,
    )


def _waiting_for_workers(process: ProcessTime) -> float:
    idle = process.overlap.host_only + process.overlap.neither
    return min(category_seconds(process, "channel") + category_seconds(process, "waiting"), idle)


def write_less(profile: Profile) -> Advice | None:
    """Suggests writing metrics or checkpoints less often if the device waits for files much of the time."""
    activities = [one for process in profile.processes for one in process.host if one.category == "storage"]
    names = {one.activity for one in activities}
    waited_for = fsum(one.host for one in profile.operations if "/".join(one.path) in names)
    writing = min(waited_for, fsum(one.seconds for one in activities))
    share = whole_time(profile).share(writing)
    if share < MIN_SHARE or len(profile.processes) > 1:
        return None
    checkpoints = fsum(one.seconds for one in activities if "checkpoint" in one.activity)
    mostly_checkpoints = checkpoints > fsum(one.seconds for one in activities) / 2
    kind = "checkpoints" if mostly_checkpoints else "metrics"
    return Advice(
        f"Write {kind} less often",
        f"For {about_percent(share)} of the time, files are written while the device waits, most of it {kind}. "
        f"Predicted if they are written a tenth as often: {about_percent(WRITTEN_LESS)} of it.",
        _rarer_checkpoints(profile) if mostly_checkpoints else f"--log-every {RARER * profile.training.log_every}",
        saves=writing * WRITTEN_LESS,
    )


def _rarer_checkpoints(profile: Profile) -> str:
    training = profile.training
    if training.checkpoint_iterations is not None:
        return f"--checkpoint-iterations {RARER * training.checkpoint_iterations}"
    return f"--checkpoint-seconds {RARER * max(training.checkpoint_seconds or 0.0, 1.0):g}"


def enlarge_batches(profile: Profile) -> Advice | None:
    """Suggests more environments if launching programs takes longer than computing them."""
    dispatching = fsum(map(_dispatching_alone, profile.processes))
    share = whole_time(profile).share(dispatching)
    computing = fsum(operation.device for operation in profile.operations)
    if share < MIN_SHARE or dispatching < computing / 2 or len(profile.processes) > 1:
        return None
    twice = 2 * profile.training.num_envs
    return Advice(
        "Compute larger batches",
        f"The device is idle for {about_percent(share)} of the time while the host starts programs, and computes "
        f"for {about_percent(whole_time(profile).share(computing))}. With {twice:,} environments, each start "
        "serves twice as many steps, which halves the starts per step. A different batch size also changes how "
        "the algorithm learns: batches are larger and updates fewer, and the learning rate and the minibatches "
        "may need tuning.",
        f"--num-envs {twice}",
        saves=_of_iteration(profile, dispatching / 2),
    )


def _dispatching_alone(process: ProcessTime) -> float:
    starting = category_seconds(process, "dispatch") + category_seconds(process, "cuda")
    return min(starting, process.overlap.host_only)


def reduce_traffic(profile: Profile) -> Advice | None:
    """Suggests moving less data if the computation of gradients is limited by memory bandwidth."""
    if profile.ceilings is None or profile.ceilings.bytes_per_second <= 0:
        return None
    operations = [one for one in _find_named(profile, GRADIENTS) if one.bytes > 0 and one.device > 0]
    moved = fsum(one.bytes for one in operations)
    traffic = moved / profile.ceilings.bytes_per_second
    products = fsum(one.flops for one in operations) / max(profile.ceilings.flops_per_second, 1.0)
    device = fsum(one.device for one in operations)
    share = whole_time(profile).share(min(traffic, device))
    is_bound = MEMORY_BOUND * device <= traffic <= CACHED * device
    if share < MIN_SHARE or not is_bound or products > traffic:
        return None
    is_timed = _fusion_is(profile, "full") or _fusion_is(profile, "auto")
    is_final = is_timed or profile.training.possible_fusion != "full"
    change = (
        (
            "Only a smaller network or batch moves less data: kernels are already fused where that is faster, or "
            "cannot be fused here."
        )
        if is_final
        else (
            f"Fused kernels keep intermediate results in registers. Predicted: {about_percent(TRAFFIC_SAVED)} of "
            "that time."
        )
    )
    return Advice(
        "Gradients are limited by memory, not by arithmetic",
        f"Gradients move {moved / 1000000000.0:.3g} GB per iteration at "
        f"{about_percent(min(traffic / device, 1.0))} of the bandwidth measured on this machine, for "
        f"{about_percent(share)} of the time. {change}",
        "" if is_final else "--fusion full",
        saves=0.0 if is_final else _of_iteration(profile, min(traffic, device) * TRAFFIC_SAVED),
    )


def distrust_utilisation(profile: Profile) -> Advice | None:
    """Points out that the utilisation reported by the driver is far above the share of time in which the device
    worked.
    """
    gaps = [(one.utilisation - _true_work(one.sm_activity, one.occupied), one) for one in profile.devices]
    if not gaps:
        return None
    gap, device = max(gaps, key=lambda pair: pair[0])
    if gap < MIN_SHARE:
        return None
    active = (
        ""
        if device.sm_activity is None
        else f", and {about_percent(device.sm_activity)} of its processors were active"
    )
    return Advice(
        "The driver's utilisation overstates the load",
        f"nvidia-smi would show {device.device} at {about_percent(device.utilisation)}, which is the share of "
        f"sampled periods in which any kernel ran at all. A kernel ran for {about_percent(device.occupied)} of "
        f"the time{active}. By these figures, the device has capacity left.",
        "",
        saves=0.0,
    )


def _true_work(sm_activity: float | None, occupied: float) -> float:
    return occupied if sm_activity is None else min(sm_activity, occupied)


Rule = Callable[[Profile], Advice | None]
RULES: tuple[Rule, ...] = (
    fuse_rollouts,
    fuse_gradients,
    fuse_on_cpu,
    add_actors,
    wait_less,
    write_less,
    enlarge_batches,
    reduce_traffic,
    distrust_utilisation,
)


def _find_named(profile: Profile, names: frozenset[str]) -> list[OperationTime]:
    """Operations of these names, and those inside."""
    return [operation for operation in profile.operations if names & set(operation.path)]


def _on_cpu(profile: Profile) -> bool:
    return "cpu" in profile.machine.device.lower()


def _fusion_is(profile: Profile, kind: str) -> bool:
    return profile.training.fusion.split()[:1] == [kind]


def _of_iteration(profile: Profile, seconds: float) -> float:
    """Returns the saving of an iteration from a sum over processes, which run at the same time."""
    return seconds / max(len(profile.processes), 1)
