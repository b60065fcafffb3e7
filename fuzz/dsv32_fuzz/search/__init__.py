"""The search for a counterexample: properties, exploration and shrinking, coverage, replay, cases known before."""
