"""Lowers convolutions, random numbers, optimiser steps and wide layers to operations that XLA computes fast."""
