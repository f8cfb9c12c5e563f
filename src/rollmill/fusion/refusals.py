"""What is raised where a function, or a part of it, cannot be said in a kernel."""


class CannotFuse(Exception):
    """A function that no kernel can compute; the text names the primitive, the line, and what would help."""

    def __init__(self, reason: str, line: str = "", advice: str = "") -> None:
        """`line` is where in the caller's code it stands, `advice` the way out, both where they are known."""
        self.reason, self.line, self.advice = reason, line, advice
        place, way_out = f"\n  at {line}" if line else "", f"\n  way out: {advice}" if advice else ""
        Exception.__init__(self, f"{reason}{place}{way_out}")


class NotLowered(Exception):
    """What a rule raises of one equation; the text says what cannot be said in a kernel, and what would help."""
