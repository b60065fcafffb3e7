"""Tracer probes: inputs whose ordinary output shows what a kernel read, with which weight, and for whom.

`counting` recovers how often each KV slot was attended, `echo` whose query answered and at which scale, `codes` which
row a gather or a converter took. None of them needs more of a kernel than its output.
"""
