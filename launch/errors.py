"""The one error of this room."""

from __future__ import annotations


class LaunchError(ValueError):
    """Something that cannot be started as asked; the message is one line with the remedy."""
