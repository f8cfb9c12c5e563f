"""The error of a primitive that no rule can lower."""


class LoweringError(Exception):
    """A rule cannot lower a primitive. The text names the obstacle and a remedy."""
