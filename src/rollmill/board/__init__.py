"""A page in the browser with a folder's runs and sweeps, behind a server for only this user."""
