"""The error of a primitive that no rule can lower."""


class LoweringError(Exception):
    """A primitive that a rule cannot lower; the text names what a kernel cannot compute, and what would help."""
