"""Other objectives on the exact update (GRPO, RLOO, MaxRL, REAL), and PPO."""
