"""Pages that load nothing: their frame and its parts, figures with axes, and text."""
