"""Traces of real runs: Kineto files as torch.profiler and vLLM write them, step by step, before against after."""
