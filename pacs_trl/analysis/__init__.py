"""Two questions the paper leaves open, answered at miniature scale. Each module is a script with its figure."""
