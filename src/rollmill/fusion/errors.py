"""Errors of functions that no kernel can compute."""


class CannotFuse(Exception):
    """A function that no kernel can compute; the text names the primitive, the line, and what would help."""

    def __init__(self, reason: str, line: str = "", advice: str = "") -> None:
        """`line` of the caller's code, and `advice` on how to change it, both where they are known."""
        self.reason, self.line, self.advice = reason, line, advice
        place, hint = f"\n  at {line}" if line else "", f"\n  hint: {advice}" if advice else ""
        Exception.__init__(self, f"{reason}{place}{hint}")


class LoweringError(Exception):
    """A primitive that a rule cannot lower; the text names what a kernel cannot compute, and what would help."""
