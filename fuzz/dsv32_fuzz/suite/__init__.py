"""The tests that `pytest --pyargs dsv32_fuzz` runs."""
