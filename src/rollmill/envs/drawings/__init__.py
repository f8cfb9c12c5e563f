"""Drawings of the environments' states, apart from their rules."""
