"""The search for the fastest way to run a training: candidates, rules to leave most of them out, and a table.

Pure: what a candidate takes and how fast it is are functions that the caller passes.
"""
