"""Advances batches of robots in MuJoCo Warp, as an operation of compiled programs on CPUs and GPUs.

MuJoCo Warp steps a whole batch at once. A program contains the step of one robot, and `vmap` turns it into one
call for all robots. Between calls, the state of a robot is only a `RobotState`. Legend: `E` robots of a batch.
"""

import copy
import hashlib
import inspect
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend import core
from jax.interpreters import batching, mlir
from jaxtyping import Array, Bool, Float

from rollmill.core.errors import UsageError, first_line
from rollmill.core.installation import install_command
from rollmill.physics.loading import UnsupportedModel, compile_source, scalar_dofs
from rollmill.physics.model import RobotState

OVERFLOWS = ("NEFC", "NJMAX_NNZ", "BROADPHASE", "NARROWPHASE", "CCD", "HFIELD", "CONTACT_MATCH", "TACTILE")
"""Names of the flags with which MuJoCo Warp reports contacts or constraint rows that it left out."""

ROLLOUT_STEPS, ROLLOUTS = 250, 4
"""Length and number of the rollouts in C MuJoCo that determine the sizes of the buffers."""

MARGIN = 4
"""Size of a buffer, relative to its largest use in the rollouts. Policies that learn to hold an object make more
contacts than random controls. For a hand, twice the largest use was too little in 26 of a million steps, and three
times the largest use in 3 of 258 million steps.
"""

MIN_CONTACTS, MIN_ROWS = 8, 16
"""Smallest sizes of the buffers, for robots that touched nothing in the rollouts."""

MAX_PAIRS = 128
"""Number of pairs of geoms up to which there is room for all of them to be near each other at the same time."""

GRAPH_MODES = {"CPU": "NONE", "a GPU": "WARP_STAGED", "several GPUs": "WARP_STAGED_EX"}
"""How a step is recorded as a CUDA graph: for fixed copies of its operands, because JAX moves its own buffers.
Of the modes, `WARP_STAGED` was the fastest for 4,096 ants on one H200. It fails in programs that are divided among
several GPUs.
"""

Buffers: TypeAlias = tuple[Any, Any]
"""Model and data of MuJoCo Warp on one device, for one size of batches."""


class BufferSizes(NamedTuple):
    """Sizes of the buffers of MuJoCo Warp."""

    contacts: int
    """Contacts of a robot, averaged over the robots of a batch, and pairs of geoms that are near each other."""
    rows: int
    """Constraint rows of each robot."""


class WarpRobots:
    """Advances robots of one model. Each instance adds an operation to the programs that call it.

    Args:
        source: MJCF or URDF as a string, the path of such a file, or a `mujoco.MjModel`.
        iterations: number of iterations of the constraint solver in every step.
        line_search_iterations: maximum number of points tried along each search direction.
        contacts: number of contacts per robot that the buffers have room for. Default: estimated from rollouts
            in C MuJoCo.
        rows: number of constraint rows per robot that the buffers have room for. Default: as for `contacts`.

    Raises:
        UsageError: MuJoCo or MuJoCo Warp is not installed, or a size is below 1.
        UnsupportedModel: MuJoCo Warp does not support a part of the model.
    """

    def __init__(
        self,
        source: Any,
        *,
        iterations: int,
        line_search_iterations: int,
        contacts: int | None = None,
        rows: int | None = None,
    ) -> None:
        self._mujoco, compiled = compile_source(source)
        self._warp, self._simulator = _import_warp()
        self._compiled = copy.deepcopy(compiled)
        self._compiled.opt.iterations, self._compiled.opt.ls_iterations = iterations, line_search_iterations
        with self._warp.ScopedDevice("cpu"):
            pairs = len(self._put_model().nxn_geom_pair_filtered)
        measured = (
            _sizes(self._mujoco, self._compiled, pairs) if contacts is None or rows is None else BufferSizes(1, 1)
        )
        self.sizes = BufferSizes(contacts or measured.contacts, rows or measured.rows)
        self._bits = sum(int(self._simulator.OverflowType[name]) for name in OVERFLOWS)
        self._scalar_dofs = scalar_dofs(compiled)
        self._buffers: dict[tuple[str, int], Buffers] = {}
        self._building = threading.Lock()
        self._calls = {mode: self._register(mode) for mode in GRAPH_MODES.values()}

    def __repr__(self) -> str:
        """Returns a string with everything that the results depend on, for digests of programs."""
        model = np.zeros(self._mujoco.mj_sizeModel(self._compiled), np.uint8)
        self._mujoco.mj_saveModel(self._compiled, None, model)
        return f"WarpRobots({hashlib.sha256(model.tobytes()).hexdigest()}, {self.sizes})"

    def advance(
        self, state: RobotState, control: Float[Array, " actuators"], steps: int
    ) -> tuple[RobotState, Bool[Array, ""]]:
        """Returns one robot after some physics steps, and whether buffers were too small for its contacts or
        constraints.
        """
        inputs = (state.positions, state.velocities, state.accelerations, control)
        batch = [jnp.asarray(values, jnp.float32)[None] for values in inputs]
        results = _advance.bind(*batch, robots=self, steps=steps)
        positions, velocities, accelerations, readings, pushes, pulls, flags = (values[0] for values in results)
        if state.sensors.size > readings.size:  # the forces on hinges and slides, too
            readings = jnp.concatenate([readings, (pushes + pulls)[np.array(self._scalar_dofs)]])
        return RobotState(positions, velocities, accelerations, readings), (flags & self._bits) != 0

    def shapes(self, count: int) -> list[tuple[tuple[int, ...], Any]]:
        """Returns shapes and dtypes of the operation's results for a batch of robots."""
        m = self._compiled
        sizes = (m.nq, m.nv, m.nv, m.nsensordata, m.nv, m.nv)
        return [*(((count, size), np.dtype(np.float32)) for size in sizes), ((count,), np.dtype(np.int32))]

    def compute(self, *batch: Array, steps: int, platform: str) -> list[Array]:
        """Advances a batch on CPUs or GPUs: `[E, ...]` coordinates, velocities, last accelerations and controls.

        Kernels are compiled here, while a program is lowered, because no program may do so while it runs in a CUDA
        graph.
        """
        count = batch[0].shape[0]
        devices = jax.local_devices(backend=platform)
        for device in {self._warp.device_from_jax(one).alias for one in devices}:
            self._buffers_of(device, count)
        mode = GRAPH_MODES["CPU" if platform == "cpu" else "a GPU" if len(devices) == 1 else "several GPUs"]
        dims = {name: shape for name, (shape, _) in zip(_RESULTS, self.shapes(count), strict=True)}
        return list(self._calls[mode](*batch, steps, output_dims=dims))

    def _put_model(self) -> Any:
        try:
            model = self._simulator.put_model(self._compiled)
        except NotImplementedError as error:
            raise UnsupportedModel(
                f"MuJoCo Warp does not support a part of the robot: {first_line(error)}. hint: use "
                "physics='mujoco', which steps the robot with C MuJoCo on the host."
            ) from None
        model.opt.graph_conditional = False  # the number of iterations is small, so that few end early
        model.opt.warn_overflow = 0  # `advance` reports it
        return model

    def _buffers_of(self, device: str, count: int) -> Buffers:
        """Returns the buffers for batches of a size on a device, which a first step filled."""
        with self._building:
            if (device, count) not in self._buffers:
                with self._warp.ScopedDevice(device):
                    model = self._put_model()
                    data = self._simulator.make_data(
                        self._compiled, nworld=count, nconmax=self.sizes.contacts, njmax=self.sizes.rows
                    )
                    self._simulator.step(model, data)
                    self._warp.synchronize_device()
                self._buffers[device, count] = model, data
            return self._buffers[device, count]

    def _register(self, graph_mode: str) -> Callable[..., Sequence[Array]]:
        """Returns the function that programs of a platform call. Its arguments are arrays of Warp."""
        warp, simulator, kinds = self._warp, self._simulator, self._mujoco.mjtEq
        follows = np.isin(self._compiled.eq_type, [kinds.mjEQ_CONNECT, kinds.mjEQ_WELD]).any()

        def advance(*arrays: Any) -> None:
            (q, v, w, u), steps, results = arrays[:4], arrays[4], arrays[5:]
            model, data = self._buffers_of(warp.get_device().alias, q.shape[0])
            for to, values in ((data.qpos, q), (data.qvel, v), (data.qacc_warmstart, w), (data.ctrl, u)):
                warp.copy(to, values)
            data.overflow.zero_()
            for _ in range(steps):
                # `step` would take the motions of the bodies for these constraints from the step before
                if follows:
                    simulator.kinematics(model, data)
                    simulator.com_pos(model, data)
                    simulator.com_vel(model, data)
                simulator.step(model, data)
            state = (data.qpos, data.qvel, data.qacc, data.sensordata)
            after = (*state, data.qfrc_actuator, data.qfrc_constraint, data.overflow)
            for to, values in zip(results, after, strict=True):
                warp.copy(to, values)

        names = (*"qvwu", "steps", *_RESULTS)
        rows = warp.array2d(dtype=float)
        types = (*[rows] * 4, int, *[rows] * 6, warp.array(dtype=int))
        advance.__annotations__ = dict(zip(names, types, strict=True))
        function: Any = advance
        function.__signature__ = inspect.Signature(
            [
                inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=kind)
                for name, kind in zip(names, types, strict=True)
            ]
        )
        return warp.jax_callable(
            function,
            num_outputs=len(_RESULTS),
            graph_mode=warp.JaxCallableGraphMode[graph_mode],
            vmap_method=None,
            module_preload_mode=warp.JaxModulePreloadMode.NONE,
        )


_RESULTS = ("positions", "velocities", "accelerations", "readings", "pushes", "pulls", "flags")
"""Results of the operation: the state, the forces of actuators and of constraints (`[E, dofs]`), and overflows."""

_advance = core.Primitive("advance_in_warp")
"""Advances a batch of robots: `[E, ...]` coordinates, velocities, last accelerations and controls."""
_advance.multiple_results = True


@_advance.def_abstract_eval
def _types(*batch: Any, robots: WarpRobots, steps: int) -> list[ShapedArray]:
    return [ShapedArray(shape, dtype) for shape, dtype in robots.shapes(batch[0].shape[0])]


@_advance.def_impl
def _compute(*batch: Array, robots: WarpRobots, steps: int) -> list[Array]:
    platform = "cuda" if jax.default_backend() == "gpu" else "cpu"
    return robots.compute(*batch, steps=steps, platform=platform)


def _batch(batch: Sequence[Array], axes: Sequence[Any], **params: Any) -> tuple[list[Array], list[int]]:
    """Joins the batches of a batch to one."""
    (size,) = {values.shape[axis] for values, axis in zip(batch, axes, strict=True) if axis is not None}
    moved = [
        jnp.broadcast_to(values, (size, *values.shape)) if axis is None else jnp.moveaxis(values, axis, 0)
        for values, axis in zip(batch, axes, strict=True)
    ]
    count = moved[0].shape[1]
    results = _advance.bind(*(values.reshape(size * count, *values.shape[2:]) for values in moved), **params)
    return [values.reshape(size, count, *values.shape[1:]) for values in results], [0] * len(results)


batching.primitive_batchers[_advance] = _batch
for _platform in ("cpu", "cuda"):
    _lowered = mlir.lower_fun(
        lambda *batch, robots, steps, platform=_platform: robots.compute(*batch, steps=steps, platform=platform),
        multiple_results=True,
    )
    mlir.register_lowering(_advance, _lowered, platform=_platform)


def _import_warp() -> tuple[Any, Any]:
    """Returns the modules `warp` and `mujoco_warp`."""
    try:
        import warp  # pyright: ignore[reportMissingImports]

        warp.config.log_level = max(warp.config.log_level, warp.LOG_WARNING)
        import mujoco_warp  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError as error:
        raise UsageError(
            f"physics='warp' needs the packages mujoco-warp and warp-lang ({error}): {install_command('warp')}."
        ) from None
    except Exception as error:
        raise UsageError(
            f"the packages of physics='warp' cannot be imported ({type(error).__name__}: {first_line(error)}). "
            f"hint: {install_command('warp')} installs compatible versions."
        ) from None
    return warp, mujoco_warp


def _sizes(mujoco: Any, compiled: Any, pairs: int) -> BufferSizes:
    """Returns sizes of buffers with a margin over what robots under random controls use in C MuJoCo.

    The robots are not reset, so that they also fall and lie. One that becomes unstable starts again.
    """
    random, data = np.random.default_rng(0), mujoco.MjData(compiled)
    limited = compiled.actuator_ctrllimited.astype(bool)
    low, high = np.where(limited[:, None], compiled.actuator_ctrlrange, [[-1.0, 1.0]]).T
    contacts = rows = 0
    mujoco.set_mju_user_warning(lambda message: None)  # MuJoCo would write it to a file in the working directory
    try:
        for _ in range(ROLLOUTS):
            mujoco.mj_resetData(compiled, data)
            data.qvel[:] = 0.5 * random.normal(size=compiled.nv)
            for _ in range(ROLLOUT_STEPS):
                data.ctrl[:] = random.uniform(low, high)
                mujoco.mj_step(compiled, data)
                contacts, rows = max(contacts, data.ncon), max(rows, data.nefc)
    finally:
        mujoco.set_mju_user_warning(None)
    near = min(pairs, MAX_PAIRS)
    return BufferSizes(max(MARGIN * contacts, near, MIN_CONTACTS), max(MARGIN * rows, MIN_ROWS))
