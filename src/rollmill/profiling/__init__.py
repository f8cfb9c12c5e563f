"""The profiler: time by operation, on hosts and devices, with the profiler's own cost taken out."""
