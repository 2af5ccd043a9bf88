"""Demonstrations of the components, a file each: numbers for a terminal and a picture for a slide.

Each computes with this project's own modules, on a CPU in seconds, and gives a `Demo`.
"""
