"""Options that many commands share: modules to import, a registered network, and trust."""

from typing import Annotated, TypeAlias

from rollmill.core.options import Arg

Imports: TypeAlias = Annotated[
    tuple[str, ...],
    Arg(
        name="import",
        metavar="MODULE",
        help="Module to import first, because it registers the environment, the network or the algorithm.",
        repeated=True,
    ),
]

NetworkName: TypeAlias = Annotated[
    str | None,
    Arg(
        name="network",
        metavar="NAME",
        help="Registered network instead of the one that --network.torso and its like describe; `rollmill list` "
        "shows them.",
    ),
]

Trust: TypeAlias = Annotated[bool, Arg(only_on=True)]
"""Whether a run may import the modules that it names."""
