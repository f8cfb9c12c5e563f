"""The shared base: `types`, `spaces`, `errors`, `machine`, and `user_frame` for lines of the user's code."""
