"""Shared foundation of all packages: types, spaces, errors, this machine, and lines of the user's code."""
