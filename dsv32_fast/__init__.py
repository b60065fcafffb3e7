"""The optimised MI355X path: the decode step (`path`), options, metadata builder, kernels behind AITER's signatures.

docs/fast.md says what is emulated and how to run it on a GPU.
"""
