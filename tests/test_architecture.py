"""The arrows of ARCHITECTURE.md, read from the imports: a file that reaches where no arrow points fails here."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("tokenizer", "data_pipeline", "model", "pretrain", "launch")
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))

# package → what of ours its files may import, each a module or a whole package
ARROWS: dict[str, set[str]] = {
    "tokenizer": {"tokenizer"},
    "data_pipeline": {"data_pipeline", "tokenizer.codec"},
    "model": {"model"},
    "pretrain": {"pretrain", "model", "data_pipeline", "tokenizer"},
    "launch": {"launch"},
}
# file or folder → its own arrows, instead of its package's
EXCEPTIONS: dict[str, set[str]] = {
    "tokenizer/__main__.py": {"tokenizer", "data_pipeline.corpus"},
    "data_pipeline/corpus.py": {"data_pipeline.readers"},
    "data_pipeline/readers/": {"data_pipeline.readers"},
    "data_pipeline/order.py": set(),
}
# outside package → the only places that may import it
ONLY_IN: dict[str, tuple[str, ...]] = {
    "deepspeed": ("pretrain/engine.py",),
    "torch": ("model/", "pretrain/", "launch/all_reduce.py"),
    "sentencepiece": ("tokenizer/",),
    "typer": (*(f"{package}/__main__.py" for package in PACKAGES), "pretrain/verbs/"),
    "pydantic": ("pretrain/config.py",),
    "safetensors": ("model/", "pretrain/checkpoint.py"),
    "datatrove": ("data_pipeline/executors.py",),
    "ray": ("data_pipeline/executors.py",),
    "datasets": ("data_pipeline/readers/huggingface.py",),
    "fsspec": ("data_pipeline/readers/places.py",),
    "liger_kernel": ("model/loss.py",),
    "gguf": ("pretrain/export_gguf.py",),
    "lm_eval": ("pretrain/harness.py",),
    "wandb": ("pretrain/wandb_sink.py",),
    "jinja2": ("pretrain/page.py",),
    "pyarrow": ("data_pipeline/readers/",),
    "zstandard": ("data_pipeline/readers/",),
}
WITHOUT_TORCH = (
    "model/config.py",
    "model/accounting.py",
    "model/activations.py",
    "model/block_activations.py",
    "model/scenes.py",
    "data_pipeline/order.py",
    "pretrain/config.py",
    "pretrain/batching.py",
    "pretrain/schedule.py",
    "pretrain/memory.py",
    "pretrain/memory_parts.py",
    "pretrain/memory_sizes.py",
    "pretrain/engine_memory.py",
    "pretrain/partitioned_memory.py",
    "pretrain/plan.py",
    "pretrain/fit.py",
    "pretrain/fit_cost.py",
    "pretrain/fit_found.py",
    "pretrain/device_memory.py",
    "pretrain/device_presets.py",
    "pretrain/estimate.py",
    "pretrain/variants.py",
    "pretrain/scaling_fit.py",
    "launch/__main__.py",
    "launch/check.py",
)


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """Every imported module of a file, and whether importing the file imports it (not inside a function)."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    lazy = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
    }
    lazy |= {
        id(node)
        for guard in ast.walk(tree)
        if isinstance(guard, ast.If) and "TYPE_CHECKING" in ast.unparse(guard.test)
        for node in ast.walk(guard)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, id(node) not in lazy
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide where an arrow points"
            assert node.module is not None
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                is_module = (ROOT / Path(*whole.split("."))).with_suffix(".py").exists()
                yield (whole if is_module else node.module), id(node) not in lazy


def within(module: str, allowed: set[str]) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in allowed)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_follow_the_arrows(path: Path) -> None:
    name = str(path.relative_to(ROOT))
    own = [
        arrows
        for place, arrows in EXCEPTIONS.items()
        if name == place or (place.endswith("/") and name.startswith(place))
    ]
    allowed = own[0] if own else ARROWS[path.relative_to(ROOT).parts[0]]
    for module, _ in imports(path):
        package = module.split(".")[0]
        if package in PACKAGES:
            assert within(module, allowed), f"{name} imports {module}; it may import {sorted(allowed)}"
        if package in ONLY_IN:
            assert name.startswith(ONLY_IN[package]), f"{name} imports {package}; only {ONLY_IN[package]} may"


def eager_closure(name: str, seen: set[str]) -> set[str]:
    """All modules that importing this file imports, through our own files."""
    for module, eager in imports(ROOT / name):
        if not eager or module in seen:
            continue
        seen.add(module)
        own = Path(*module.split(".")).with_suffix(".py")
        if (ROOT / own).exists():
            eager_closure(str(own), seen)
    return seen


@pytest.mark.parametrize("name", WITHOUT_TORCH)
def test_arithmetic_needs_no_torch(name: str) -> None:
    heavy = {module.split(".")[0] for module in eager_closure(name, set())} & {"torch", "deepspeed"}
    assert not heavy, f"importing {name} imports {heavy}"


def test_every_import_is_declared() -> None:
    """What the code imports stands in pyproject.toml.

    Not the other way round: tensorboard is used through torch; docs/dependencies.md says so.
    """
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    lines = project["dependencies"] + [
        line for extra in ("cluster", "eval", "gguf", "gpu", "wandb") for line in extras[extra]
    ]
    declared = {re.split(r"[\[>]", line)[0].replace("-", "_") for line in lines}
    used = {module.split(".")[0] for path in FILES for module, _ in imports(path)}
    foreign = used - set(PACKAGES) - set(sys.stdlib_module_names) - {"__future__"}
    assert foreign <= declared, f"imported but not declared: {foreign - declared}"


def test_the_impostor_check_is_the_same_everywhere() -> None:
    """The arrows leave five commands no room to share: what all must do alike stands five times, word for word."""
    copies = set()
    for package in PACKAGES:
        source = (ROOT / package / "__main__.py").read_text(encoding="utf-8")
        functions = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
        copies |= {ast.get_source_segment(source, node) for node in functions if node.name == "_refuse_impostors"}
    assert len(copies) == 1


def test_no_attic() -> None:
    attics = [path for path in FILES if path.stem in {"utils", "util", "common", "helpers", "misc"}]
    assert not attics, f"a homeless function shows that a module is missing: {attics}"


def test_the_rule_sees_a_wrong_arrow(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.py"
    wrong.write_text("def f():\n    from pretrain import train\n")
    assert list(imports(wrong)) == [("pretrain.train", False)]
    assert not within("pretrain.train", ARROWS["model"])
