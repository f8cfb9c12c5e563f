"""Describes values in messages by their structure, showing types instead of arrays."""

from typing import Any

import jax


def outline(value: Any) -> str:
    """Returns a value's structure in one line, with types as leaves."""
    if type(value) is tuple:
        return f"a tuple of {len(value)} values ({', '.join(outline(part) for part in value)})"
    leaves = jax.tree_util.tree_leaves_with_path(value)
    if len(leaves) == 1 and not leaves[0][0]:
        return type_of(leaves[0][1])
    parts = [f"{jax.tree_util.keystr(path)}: {type_of(leaf)}" for path, leaf in leaves]
    return f"{type(value).__name__}({', '.join(parts)})"


def type_of(leaf: Any) -> str:
    """Returns an array's dtype and shape, or the type of anything else."""
    if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        return type(leaf).__name__
    return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"
