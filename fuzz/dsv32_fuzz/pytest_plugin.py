"""The pytest plugin: the checks as part of a user's own CI."""
