"""Registers environments, algorithms and networks by name: built-in, from installed packages, or from users."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any, TypeVar

from rollmill.core.errors import UsageError, unknown_name
from rollmill.core.plugins import REGISTER, Kind, Plugin, modules_being_imported, plugins, plugins_named
from rollmill.core.user_frame import user_frame

T = TypeVar("T")

WITH_ARTICLE = {"environment": "an environment", "algorithm": "an algorithm", "network": "a network"}


class Registry(dict[str, T]):
    """All environments, algorithms or networks by name. Iterating yields those that are built in or registered."""

    def __init__(self, kind: Kind, built_in: Mapping[str, T]) -> None:
        super().__init__(built_in)
        self._kind: Kind = kind
        self._built_in = built_in
        self._origins: dict[str, tuple[str, ...]] = {}

    def copy(self) -> "Registry[T]":
        """Returns an independent copy of the registry."""
        other = Registry(self._kind, self._built_in)
        other.update(self)
        other._origins = dict(self._origins)
        return other

    def check(self, name: Any, function: Any, *, overwrite: bool) -> None:
        """Checks whether a part can be registered under a name, with a function that creates it.

        Raises a `UsageError` if the name is taken or invalid, or if the function is not callable.
        """
        kind = WITH_ARTICLE[self._kind]
        if not isinstance(name, str):
            raise UsageError(
                f"cannot register {name!r:.60}: the name of {kind} must be a string, not a {type(name).__name__}."
            )
        if not name or name.startswith("-") or ":" in name or not name.isprintable() or " " in name:
            raise UsageError(
                f"cannot register {name!r}: the name of {kind} must be a single word without a colon or a "
                "leading dash."
            )
        if name in self and not overwrite:
            raise UsageError(
                f"{kind} {name!r} is already registered. hint: choose another name, or pass overwrite=True."
            )
        if not callable(function):
            raise UsageError(
                f"cannot register {name!r}: {kind} needs a function that creates it, got a "
                f"{type(function).__name__}."
            )

    def register(self, name: str, part: T) -> None:
        """Registers a part under a checked name, and records the modules whose import is calling this method."""
        self[name], self._origins[name] = part, modules_being_imported()

    def find(self, name: str, *, hint: str, meant: str | None = None) -> T:
        """Returns the entry registered as `name`. If a package offers it, the package's module is imported.

        Raises a `UsageError` with `hint`, and with `meant` or the nearest names, if the name is unknown, or if its
        package cannot be used.
        """
        if name not in self and not self._load(name):
            known = {*self, *(plugin.name for plugin in plugins(self._kind))}
            raise unknown_name(self._kind, name, known or ["none"], hint=hint, meant=meant)
        return self[name]

    def has(self, name: str) -> bool:
        """Returns whether a part called `name` exists, without importing anything."""
        return name in self or bool(plugins_named(self._kind, name))

    def origin(self, name: str) -> tuple[str, ...]:
        """Returns the modules whose import registered a name, with the innermost first."""
        return self._origins.get(name, ())

    def is_built_in(self, name: str) -> bool:
        """Returns whether the name refers to a built-in part."""
        return name in self._built_in and self.get(name) is self._built_in[name]

    def is_users(self, name: str) -> bool:
        """Returns whether the user registered the name in this process. Other processes may not know it."""
        if self.get(name) is self._built_in.get(name):
            return False  # built in, or the name of an adapter, which is not registered
        offered = plugins_named(self._kind, name)
        return not (len(offered) == 1 and offered[0].module in self.origin(name))

    def load_plugins(self) -> list[tuple[Plugin, str]]:
        """Imports the modules of all packages that offer parts of the registry's kind.

        Returns each part with the reason why it cannot be used, or with an empty string if it can.
        """
        return [(plugin, self._problem(plugin)) for plugin in plugins(self._kind)]

    def _problem(self, plugin: Plugin) -> str:
        try:
            if plugin.name not in self:
                self._load(plugin.name)
        except UsageError as error:
            return str(error)
        if plugin.module in self.origin(plugin.name):
            return ""
        return (
            f"the name {plugin.name!r}, which the package {plugin.package} provides, is already taken, so that "
            "the package is ignored."
        )

    def _load(self, name: str) -> bool:
        """Imports the module of the package that offers a name. Returns False if there is none."""
        offered = plugins_named(self._kind, name)
        if len(offered) > 1:
            packages = " and ".join(f"{plugin.package} ({plugin.module})" for plugin in offered)
            raise UsageError(
                f"several packages provide the {self._kind} {name!r}: {packages}. hint: import the one that you "
                "want (--import MODULE), or uninstall the other."
            )
        for plugin in offered:
            self._import(plugin)
        return bool(offered)

    def _import(self, plugin: Plugin) -> None:
        what = f"the package {plugin.package}, which provides the {plugin.kind} {plugin.name!r}, cannot be used"
        try:
            import_module(plugin.module)
        except (Exception, SystemExit) as error:  # importing a user's package can raise anything
            raise UsageError(f"{what}: {type(error).__name__}: {error}, at {user_frame(error)}.") from error
        if plugin.name not in self:
            raise UsageError(
                f"{what}: the module {plugin.module} does not register this name when it is imported. hint: "
                f"call rollmill.{REGISTER[plugin.kind]}({plugin.name!r}, ...) in that module."
            )
