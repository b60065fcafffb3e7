"""A small serving engine and what drives it: a Hypothesis state machine, and the traffic class `serving`."""
