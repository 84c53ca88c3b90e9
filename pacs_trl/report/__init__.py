"""Tables, figures and model cards from results files. Neither torch nor vllm is needed to read them."""
