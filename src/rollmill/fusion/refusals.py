"""What is raised where a function, or a part of it, cannot be said in a kernel."""


class CannotFuse(Exception):
    """A function that no kernel can compute; the text names the primitive, the line, and what would help."""


class NotLowered(Exception):
    """What a rule raises of one equation; the text says what cannot be said in a kernel, and what would help."""
