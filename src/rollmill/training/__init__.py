"""Prepares, runs, records and resumes training runs."""
