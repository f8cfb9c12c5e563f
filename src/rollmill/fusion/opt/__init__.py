"""Passes over programs, in the order in which they are applied. None of them changes a node.

`branches` finds nodes that only some environments need, `segments` cuts long programs, `schedule` puts both and all
loops into the order in which a program is written. `skinny_matmul` finds products that tensor cores would not take as
they are. (Folding and merging of equal nodes are no passes: they happen when nodes are made, see `ir`.)
"""
