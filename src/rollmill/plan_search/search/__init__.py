"""The search for the fastest plan: candidates, rules that exclude most of them, and a table.

Pure: what a candidate takes and how fast it is are functions that the caller passes.
"""
