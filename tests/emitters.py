"""How XLA compiles the programs of tests for a CPU: quickly.

For fused operations XLA has newer code generators, whose programs are faster, and had older ones until
jaxlib 0.11, which take half the time. They round differently where a product is added to something.
"""

from importlib import metadata

HAS_BOTH = metadata.version("jaxlib") < "0.11"

FAST_COMPILATION = " ".join(
    [
        *(["--xla_cpu_use_fusion_emitters=false"] if HAS_BOTH else []),
        "--xla_cpu_parallel_codegen_split_count=1",  # the other core has tests of its own
        "--xla_cpu_prefer_vector_width=128",
    ]
)
"""The flags of XLA that tests run with, unless they are slow ones."""
AS_USERS = {"xla_cpu_use_fusion_emitters": True} if HAS_BOTH else {}
"""The option of a program that is to be compiled as users' programs are, for tests that compare all bits."""
