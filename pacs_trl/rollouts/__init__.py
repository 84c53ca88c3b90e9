"""Draw: rows of completions, the trainer that draws them, and what a run needs to start, stop and go on."""
