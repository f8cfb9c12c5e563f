"""Which of XLA's code generators for fused operations on a CPU compiles a program in tests.

XLA has newer ones, whose programs are faster, and had older ones until jaxlib 0.11, which take half the time.
They round differently where a product is added to something.
"""

from importlib import metadata

HAS_BOTH = metadata.version("jaxlib") < "0.11"

FAST_COMPILATION = "--xla_cpu_use_fusion_emitters=false" if HAS_BOTH else ""
"""The flag of XLA that tests run with, unless they are slow ones."""
AS_USERS = {"xla_cpu_use_fusion_emitters": True} if HAS_BOTH else {}
"""The option of a program that is to be compiled as users' programs are, for tests that compare all bits."""
