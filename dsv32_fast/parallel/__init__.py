"""Tensor parallelism of the optimised path: shards as vLLM cuts them, agreement of ranks, TP N held against TP 1."""
