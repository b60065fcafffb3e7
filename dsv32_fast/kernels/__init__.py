"""Kernels behind AITER's names and signatures."""
