"""Tables and figures of results files, without torch or vLLM."""
