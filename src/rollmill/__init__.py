"""Rollmill."""
