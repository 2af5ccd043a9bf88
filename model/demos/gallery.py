"""All demonstrations on one page: a folder with index.html and a picture each."""

import html
from collections.abc import Callable
from pathlib import Path

from model.config import ModelConfigError
from model.demos.demo import NAMES, run, save_picture

STYLE = """body { font: 16px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem }
img { width: 100%; border: 1px solid #ccc; background: white }
pre { overflow-x: auto; background: #f4f4f4; color: #111; padding: 1rem }
h2 { margin-top: 3rem }"""


def write(folder: Path, on_demo: Callable[[str], None] = lambda name: None) -> Path:
    """Compute and draw them all; the page's path. ModelConfigError where the folder's place is taken by a file."""
    if folder.exists() and not folder.is_dir():
        raise ModelConfigError(f"--out {folder}: is a file: name a folder")
    folder.mkdir(parents=True, exist_ok=True)
    sections = []
    for name in NAMES:
        on_demo(name)
        demo = run(name)
        save_picture(demo, folder / f"{name}.png")
        title, text = html.escape(demo.title), html.escape("\n".join(demo.lines))
        sections.append(
            f'<h2 id="{name}">{title}</h2>\n<p><code>python -m model demo {name}</code></p>\n'
            f'<img src="{name}.png" alt="{title}">\n<pre>{text}</pre>'
        )
    links = " · ".join(f'<a href="#{name}">{name}</a>' for name in NAMES)
    page = folder / "index.html"
    page.write_text(
        f'<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n<title>Components of a decoder</title>\n'
        f"<style>{STYLE}</style>\n<h1>Components of a decoder</h1>\n<p>{links}</p>\n"
        + "\n".join(sections)
        + "\n</html>\n",
        encoding="utf-8",
    )
    return page
