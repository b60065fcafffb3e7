"""Latency of the decode step: exact counts of what it launches, and timing with a verdict that knows its own noise."""
