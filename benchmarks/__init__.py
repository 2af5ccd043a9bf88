"""Ratios to named references; README.md says which. The parts of data.py are modules here, the others scripts."""
