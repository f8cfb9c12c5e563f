"""Trained policies in use: loading, evaluation, export, rendering, play and matches."""
