"""The verbs of `python -m pretrain`, a file each: a function, and its EXAMPLES."""
