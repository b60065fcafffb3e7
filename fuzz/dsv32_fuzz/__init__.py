"""Cases, strategies, checks, targets and campaigns."""
