"""`pettingzoo:FAMILY/NAME`: parallel multi-agent environments of PettingZoo, Python objects on the host CPU (Terry
et al., "PettingZoo: Gym for Multi-Agent Reinforcement Learning", NeurIPS 2021), version 1.27, with mpe2.
"""

import functools
import importlib
import pkgutil
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from rollmill.core.errors import UsageError, unknown_name
from rollmill.core.types import HostEnvironment
from rollmill.envs.adapters import import_extra, import_registering
from rollmill.envs.host import parallel_environment
from rollmill.envs.options import keyword_names, takes_any, unknown_option

PARTICLES = "mpe/"
"""Family of the particle environments, which are in a separate package, mpe2."""


class _Source(NamedTuple):
    """A function that makes an environment, and the function that defines its arguments, if known."""

    create: Callable[..., Any]
    takes: Callable[..., Any] | None


def make(name: str, **options: Any) -> HostEnvironment:
    """Makes the PettingZoo environment called `name`.

    Args:
        name: `mpe/simple_spread_v3`, `butterfly/pistonball_v6` or another id of PettingZoo, or `module:id`, which
            first imports the module that registers it (`pettingzoo.register("parallel", ...)`).
        **options: arguments of the environment, such as `max_cycles=50`.

    Raises:
        UsageError: a package is not installed, the environment is turn-based, or there is no such environment or
            option.
        ContractError: making or resetting it raised an exception.
    """
    pettingzoo = import_extra("pettingzoo", "pettingzoo")
    module, _, registered = name.rpartition(":")
    if module:
        import_registering(module, f"pettingzoo:{name}")
    source = _source(pettingzoo, registered, by_module=bool(module))
    _check_options(f"pettingzoo:{name}", source, options)
    return parallel_environment(f"pettingzoo:{name}", functools.partial(_make_one, name, source, options))


def _source(pettingzoo: Any, name: str, *, by_module: bool) -> _Source:
    if name.startswith(PARTICLES):
        return _particles(name)
    specs: Mapping[str, Any] = {_id(known): spec for known, spec in pettingzoo.parallel_registry.items()}
    if _id(name) in specs:
        return _find_registered(name, specs[_id(name)])
    if _id(name) in map(_id, pettingzoo.aec_registry):
        raise UsageError(
            f"pettingzoo:{name} is turn-based (AEC), which is not supported. hint: use one of PettingZoo's "
            "parallel environments, or one of the two-player games that `rollmill list` shows."
        )
    hint = "" if by_module else "If another package registers it, name that package: pettingzoo:MODULE:ID."
    known = [*specs, *(PARTICLES + particle for particle in _names_of_particles(missing_ok=True))]
    raise unknown_name("PettingZoo environment", name, known, hint=hint)


def _id(name: str) -> str:
    """Returns an id as its module is named, `pistonball_v6`. PettingZoo registers `pistonball-v6`."""
    stem, dash, version = name.rpartition("-v")
    return f"{stem}_v{version}" if dash and version.isdecimal() else name


def _names_of_particles(*, missing_ok: bool = False) -> list[str]:
    try:
        package = import_extra("mpe2", "pettingzoo")
    except UsageError:
        if missing_ok:
            return []
        raise
    return [found.name for found in pkgutil.iter_modules(package.__path__) if "_v" in found.name]


def _particles(name: str) -> _Source:
    known = [PARTICLES + particle for particle in _names_of_particles()]
    if _id(name) not in known:
        raise unknown_name("PettingZoo environment", name, known)
    module = importlib.import_module(f"mpe2.{_id(name).removeprefix(PARTICLES)}")
    return _Source(module.parallel_env, module.raw_env)


def _find_registered(name: str, spec: Any) -> _Source:
    """Returns the function of a registered environment, with the arguments that it was registered with."""
    create, beside = spec.entry_point, None
    if isinstance(create, str):
        module_name, _, attribute = create.partition(":")
        try:
            module = importlib.import_module(module_name)
        except ImportError as error:
            raise _missing(name, error) from None
        create, beside = getattr(module, attribute), getattr(module, "raw_env", None)
    limit = {} if spec.max_cycles in (None, -1) else {"max_cycles": spec.max_cycles}
    # The wrappers of PettingZoo take any arguments, and pass them on to the class next to them.
    takes = beside if takes_any(create) else create
    return _Source(functools.partial(create, **{**limit, **spec.kwargs}), takes)


def _check_options(name: str, source: _Source, options: dict[str, Any]) -> None:
    if source.takes is None or takes_any(source.takes):
        return
    known = keyword_names(source.takes)
    for option in options:
        if option not in known:
            raise unknown_option(name, option, known)


def _make_one(name: str, source: _Source, options: dict[str, Any]) -> Any:
    try:
        return source.create(**options)
    except ImportError as error:
        raise _missing(name, error) from None
    except TypeError as error:
        if options and "unexpected keyword argument" in str(error):
            raise UsageError(f"pettingzoo:{name}: {error}.") from None
        raise


def _missing(name: str, error: ImportError) -> UsageError:
    reason = str(error).strip().rstrip(".").partition("\n")[0]
    return UsageError(f"pettingzoo:{name} needs a package that is not installed: {reason}.")
