"""Compiles the pieces between the points (crossings) at which a program exchanges data with other groups."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.extend import core
from jaxtyping import PyTree

from rollmill.dataflow import DividedProgram, Handlers, Piece, answer_crossings, walk, walk_leaves
from rollmill.programs.compiler_options import program_options


class CompiledPieces:
    """A program divided at its crossings, whose pieces are compiled when they first run."""

    def __init__(self, program: DividedProgram) -> None:
        self._program = program
        self._compiled = {
            id(piece): jax.jit(core.jaxpr_as_fun(piece.program), compiler_options=program_options())
            for piece in program.pieces
        }

    def walk(self, *arguments: PyTree):
        """Runs the program, and yields the name and operands of each crossing. See `dataflow.walk`."""
        return walk(self._program, *arguments, run=self._run)

    def walk_leaves(self, leaves: Sequence[Any]):
        """Runs the program like `walk`, but takes and returns lists of leaves. See `dataflow.walk_leaves`."""
        return walk_leaves(self._program, leaves, run=self._run)

    def __call__(self, handlers: Handlers, *arguments: PyTree) -> PyTree:
        """Runs the program, and answers each crossing by its handler."""
        return answer_crossings(self.walk(*arguments), handlers)

    def _run(self, piece: Piece, values: Sequence[Any]) -> Sequence[Any]:
        return self._compiled[id(piece)](*values)
