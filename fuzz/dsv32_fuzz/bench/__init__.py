"""Measurements of the suite's own speed; they return data and render nothing."""
