"""A browser page with a folder's runs and sweeps, served only to this user."""
