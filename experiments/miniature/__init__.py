"""A model of 0.1 to 1 million parameters, its tokenizer, tasks, and warm start, which train on two CPU cores."""
