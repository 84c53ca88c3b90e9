"""What a recipe will do, what it needs and what is wrong with it, without a GPU."""
