"""Replay of recorded outputs of independent implementations."""
