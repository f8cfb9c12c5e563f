"""Transforms by name: one definition of each, for environments of JAX functions and for Python objects."""

from rollmill.envs.named_transforms.applying import OPTION, transform
from rollmill.envs.named_transforms.notation import TRANSFORMS, parse_transforms

__all__ = ["OPTION", "TRANSFORMS", "parse_transforms", "transform"]
