"""Analysis passes over programs. They find structure, and do not change nodes.

`schedule` orders the nodes of a program into branches, segments and loops. It uses `branches`, which finds nodes
that only some environments need, and for Triton `segments`, which divides long programs. `skinny_matmul` finds
products that must be padded for tensor cores. `passes` lists all four for `rollmill explain --ir`. Folding, and
the merging of equal nodes, happen earlier, when nodes are created.
"""
