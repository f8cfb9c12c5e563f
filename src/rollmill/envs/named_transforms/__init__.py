"""Transforms that have names. Each works for environments written in JAX and for Python objects."""

# Most runs have no transforms, so each name is imported at its first use.
from typing import TYPE_CHECKING

from rollmill.core.lazy_names import lazy_names

if TYPE_CHECKING:
    from rollmill.envs.named_transforms.applying import OPTION as OPTION, transform as transform
    from rollmill.envs.named_transforms.notation import (
        TRANSFORMS as TRANSFORMS,
        parse_transforms as parse_transforms,
    )

__getattr__, __dir__, __all__ = lazy_names(__name__)
