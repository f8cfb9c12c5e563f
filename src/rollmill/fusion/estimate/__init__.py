"""Estimates costs, register pressure and a chip's bounds from a program, before compilation."""
