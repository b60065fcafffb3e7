"""CPU emulation of what AITER's kernels observably do."""
