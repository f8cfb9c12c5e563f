"""Evaluates policies by playing a number of whole episodes."""
