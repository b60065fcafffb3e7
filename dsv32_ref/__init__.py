"""The reference path of DeepSeek-V3.2 decode and its error bounds (ground floor: imports nothing of ours)."""
