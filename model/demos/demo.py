"""What a demonstration is, and which there are."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from model.config import ModelConfigError, nearest

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAMES = (
    "norm", "rope", "positions", "gradient_flow", "residual_init", "kv_cache", "qk_norm", "activations", "gate",
    "softmax_scale", "tying", "loss",
)  # fmt: skip
SUFFIXES = (".png", ".svg", ".pdf")


@dataclass(frozen=True)
class Demo:
    """What a demonstration found: as lines to read, as numbers by name, and as a picture to draw."""

    title: str
    lines: tuple[str, ...]
    numbers: dict[str, Any]
    draw: Callable[["Figure"], None]


def run(name: str) -> Demo:
    """Compute the demonstration of that name. ModelConfigError for another one, naming the nearest."""
    if name not in NAMES:
        raise ModelConfigError(f'no demonstration "{name}"{nearest(name, NAMES)}; there are: {", ".join(NAMES)}')
    demo: Demo = importlib.import_module(f"model.demos.{name}").demo()
    return demo


def save_picture(demo: Demo, path: Path) -> None:
    """Draw it 16 by 9, in the format that the suffix names. ModelConfigError for a path that cannot be written."""
    check_picture_path(path)
    from matplotlib import rc_context
    from matplotlib.figure import Figure  # without pyplot: no window, no state

    style: Any = {"font.size": 13, "axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": demo.title}
    with rc_context(style):
        figure = Figure(figsize=(12.8, 7.2), layout="constrained")
        figure.suptitle(demo.title, fontsize=17)
        demo.draw(figure)
        figure.savefig(path, dpi=125)


def check_picture_path(path: Path) -> None:
    """Raise ModelConfigError unless a picture can be written there; for before the work."""
    if path.suffix.lower() not in SUFFIXES:
        raise ModelConfigError(f"--plot {path}: the name must end in {', '.join(SUFFIXES)}")
    if path.is_dir():
        raise ModelConfigError(f"--plot {path}: is a folder: name a file in it")
    if not path.parent.is_dir():
        raise ModelConfigError(f"--plot {path}: there is no folder {path.parent}: make it, or choose another")
