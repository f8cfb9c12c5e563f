"""Self-contained HTML pages: frame, tables, figures with axes, and escaped text."""
