"""The trainer: recipes, the DeepSpeed engine, checkpoints, evaluation."""
