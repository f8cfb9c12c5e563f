"""Packs the metrics of an iteration into one vector, because each transfer from a GPU has a fixed cost."""

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from rollmill.dataflow import Metrics


class PackedMetrics(eqx.Module):
    """The metrics of an iteration, packed into one vector. Their names are known once the iteration has been
    traced.
    """

    values: Float[Array | np.ndarray, "*S metric"]
    names: tuple[str, ...] = eqx.field(static=True)

    def row(self) -> dict[str, float]:
        """Returns the metrics of a single seed as floats on the host."""
        return dict(zip(self.names, np.asarray(self.values).tolist(), strict=True))


def pack_metrics(metrics: Metrics) -> PackedMetrics:
    """Packs metrics into one vector, in alphabetical order of their names."""
    names = tuple(sorted(metrics))
    return PackedMetrics(jnp.stack([metrics[name] for name in names]), names)
