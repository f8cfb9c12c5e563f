"""Passes over programs, in the order in which they are applied. None of them changes a node.

`branches` finds nodes that only some environments need, `segments` cuts long programs, `skinny_matmul` finds
products that tensor cores would not take as they are, and `schedule` puts branches, segments and loops into the
order in which a program is written. `passes` lists them. Folding, and merging of equal nodes, happen earlier, when
nodes are made.
"""
