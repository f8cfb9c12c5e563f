"""Self-contained HTML pages: their frame and its parts, figures with axes, and text."""
