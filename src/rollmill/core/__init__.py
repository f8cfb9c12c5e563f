"""Types, spaces, errors, and the description of this machine, which all other packages use."""
