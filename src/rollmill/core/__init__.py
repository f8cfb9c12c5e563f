"""The shared base: `types`, `spaces`, `errors`, `machine`, and `own_line` for lines of the user's code."""
