"""Kernels behind AITER's names and signatures: `emulated` on any machine, `aiter` on ROCm."""
