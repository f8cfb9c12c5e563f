"""Trained policies in use: loaded, evaluated, exported, rendered, played with, and in matches."""
