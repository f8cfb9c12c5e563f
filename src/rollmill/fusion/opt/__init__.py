"""Analyses and rewriting of programs: branches, segments of long programs, skinny matrix products."""
