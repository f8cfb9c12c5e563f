"""Passes over programs: each finds structure, and none of them changes a node.

`schedule` puts the nodes of a program into the order in which it is written, with branches, segments and loops. It
calls `branches`, which finds nodes that only some environments need, and for Triton `segments`, which cuts long
programs. `skinny_matmul` finds products that need padding for tensor cores, for the Triton code generator.
`passes` lists all four for `rollmill explain --ir`. Folding, and merging of equal nodes, happen earlier, when
nodes are made.
"""
