"""Benchmarks that return data."""
