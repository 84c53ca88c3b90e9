"""GenAC studies: quality of a critic that reasons, and of the policy that it trains."""
