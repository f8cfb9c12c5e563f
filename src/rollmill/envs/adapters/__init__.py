"""Adapters: one file for each ecosystem whose environments Rollmill runs; imported when asked for."""
