"""Starts the trainer: local ranks through the deepspeed launcher."""
