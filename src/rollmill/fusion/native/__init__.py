"""Machine code for CPUs, by LLVM: what other modules may know without LLVM being there."""

from rollmill.fusion.native.launch import CodeLaunch, describe_processor, usable_cores

__all__ = ["CodeLaunch", "describe_processor", "usable_cores"]
