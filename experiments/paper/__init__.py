"""The tables and figures of the paper: their runs, records, and rendering."""
