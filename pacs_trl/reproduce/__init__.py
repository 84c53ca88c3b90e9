"""The runs behind the tables of the paper, and the tables."""
