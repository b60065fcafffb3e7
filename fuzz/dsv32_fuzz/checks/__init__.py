"""One verdict or several: what a check says, and over what."""
