"""The commands of `dsv32`, one module each; `dsv32_reports.cli` registers them."""
