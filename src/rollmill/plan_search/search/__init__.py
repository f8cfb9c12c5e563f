"""The search for the fastest plan: candidates, rules that exclude most of them, and a table.

This package is pure: the caller passes functions that return the memory and the speed of a candidate.
"""
