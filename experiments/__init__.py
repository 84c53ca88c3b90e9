"""The runs, tables, and figures behind docs/results, and the quickstart; not in the wheel."""
