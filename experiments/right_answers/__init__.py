"""Objectives on problems with many correct answers, with SmolLM2-135M-Instruct."""
