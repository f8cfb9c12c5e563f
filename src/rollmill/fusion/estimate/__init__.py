"""Estimates a program's cost, register pressure and maximum speed on a GPU, before compiling it."""
