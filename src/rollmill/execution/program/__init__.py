"""A graph as one compiled program: its kernels, its devices, and the loop that dispatches it."""
