"""Runs CUDA kernels on a CPU, and finds what a GPU would let pass: see `build` and `Library.run`."""

from tests.support.cuda_on_cpu.build import BuildError, build, translate
from tests.support.cuda_on_cpu.library import ORDERS, KernelFault, Library

__all__ = ["ORDERS", "BuildError", "KernelFault", "Library", "build", "translate"]
