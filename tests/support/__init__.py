"""Models, runs, servers, and other things that tests share, one module per subject."""
