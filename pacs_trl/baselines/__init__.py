"""Baselines: GRPO, RLOO, MaxRL, and REAL on the exact update, and PPO."""
