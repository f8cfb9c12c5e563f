"""Lowers the jaxpr of a function of one environment to a program of nodes.

`function` is the way in; `jaxpr` reads equation by equation, and `rules` has a rule for each primitive.
"""
