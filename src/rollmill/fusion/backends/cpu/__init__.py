"""CPU kernels: programs compiled to machine code by LLVM."""
