"""The nouns that every room uses: `types`, `spaces`, `errors`, `machine`, and `own_line` for the user's lines."""
