"""Estimates from a program alone, before anything is compiled: costs, register pressure, bounds of a chip."""
