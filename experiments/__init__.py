"""Analyses and demonstrations that need the repository around them: recipes, warm starts, figures."""
