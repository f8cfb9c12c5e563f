"""Lowers the jaxpr of a function of one environment to a program.

`function` is the entry point. `jaxpr` reads a jaxpr equation by equation, and `rules` has a rule for each
primitive.
"""
