"""What the papers say exists: commands, options, files, links, recipe keys. A paper that went stale fails here."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterator
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, get_args

import pytest
from typer.main import get_command

from model.accounting import parameter_count
from model.config import ModelConfig
from pretrain.config import RunConfig, load_recipe

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("tokenizer", "data_pipeline", "model", "pretrain", "launch")
FOLDERS = ("docs", "ds_configs", "benchmarks")
PAPERS = sorted([*ROOT.glob("*.md"), *(file for folder in FOLDERS for file in (ROOT / folder).glob("*.md"))])
RECIPES = sorted((ROOT / "pretrain" / "recipes").glob("*.toml"))
COMMANDED = [*PAPERS, *RECIPES, ROOT / "Makefile"]
README, CHINESE, ARCHITECTURE = ROOT / "README.md", ROOT / "README.zh.md", ROOT / "ARCHITECTURE.md"

# What belongs to the project. A person's own files (runs, data, tokenizers, recipes) may lie beside it.
OURS = (*PACKAGES, "tests", "docs", "ds_configs", "benchmarks", ".ci")
TOP = ("*.md", "pyproject.toml", "constraints.txt", "Makefile", ".gitignore")
# Written so that this file does not hold what it looks for.
MACHINE_PATHS = re.compile("/" + r"(?:work|root|home|Users|tmp|mnt|workspace)/|[A-Z]:\\Users")


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def code_blocks(text: str) -> list[tuple[str, str]]:
    """(language, content) of each fenced block."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def without_comment(line: str) -> str:
    return re.sub(r"(^|\s+)#.*$", "", line).rstrip()


def command_lines(text: str) -> list[str]:
    """The command lines of the sh blocks, comments and empty lines aside."""
    blocks = "".join(content for language, content in code_blocks(text) if language == "sh")
    lines = blocks.replace("\\\n", "").splitlines()
    return [" ".join(line.split()) for line in map(without_comment, lines) if line]


# ---------------------------------------------------------------- commands


def uses(text: str) -> Iterator[tuple[str, str, list[str]]]:
    """(package, verb, options) of every `python -m PACKAGE VERB ...`, and of `deepspeed --module pretrain ...`."""
    starts = r"(?:python -m|deepspeed --module) ([a-z_]+) ([a-z]+)\b([^`\n|]*)"
    for package, verb, rest in re.findall(starts, text.replace("\\\n", " ")):
        if package in PACKAGES:
            yield package, verb, re.findall(r"(?<!\S)--[a-z][a-z-]*", without_comment(rest))


def commands(package: str) -> dict[str, Any]:
    group: Any = get_command(importlib.import_module(f"{package}.__main__").app)
    return dict(group.commands)


def faults(text: str) -> list[str]:
    """Verbs and options in a text that the command lines do not have."""
    found = []
    for package, verb, options in uses(text):
        if verb not in commands(package):
            found.append(f"python -m {package} {verb}")
            continue
        parameters = commands(package)[verb].params
        known = {option for one in parameters for option in (*one.opts, *one.secondary_opts)} | {"--help"}
        found += [f"python -m {package} {verb} {option}" for option in options if option not in known]
    return found


@pytest.mark.parametrize("path", COMMANDED, ids=name)
def test_commands_exist(path: Path) -> None:
    assert not faults(path.read_text(encoding="utf-8"))


def test_the_rule_sees_a_wrong_command() -> None:
    assert faults("`python -m pretrain fly now`") == ["python -m pretrain fly"]
    assert faults("deepspeed --module pretrain run x.toml \\\n  --rnu runs/x") == ["python -m pretrain run --rnu"]
    assert not faults("python -m pretrain run x.toml --run runs/x    # --flag of a comment")


@pytest.mark.parametrize("path", PAPERS, ids=name)
def test_make_targets_exist(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    spoken = " ".join([*re.findall(r"`([^`\n]+)`", text), *command_lines(text)])
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"\bmake ([a-z]+)\b", spoken))
    assert named <= targets


def test_every_verb_stands_in_the_architecture() -> None:
    text = ARCHITECTURE.read_text(encoding="utf-8")
    listed = {found for line in re.findall(r"__main__\.py +(.+)", text) for found in line.split(", ")}
    for package in ("tokenizer", "data_pipeline", "model", "pretrain"):
        assert set(commands(package)) <= listed


# ---------------------------------------------------------------- the two READMEs


def test_both_readmes_have_the_same_commands() -> None:
    english, chinese = (path.read_text(encoding="utf-8") for path in (README, CHINESE))
    assert command_lines(english)
    assert command_lines(english) == command_lines(chinese)


def test_both_readmes_have_the_same_structure() -> None:
    def shape(path: Path) -> list[str]:
        lines = re.sub(r"^```.*?^```", "```", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        return re.findall(r"^(#+|```|- |\|)", lines, re.MULTILINE)

    assert shape(README) == shape(CHINESE)


@pytest.mark.parametrize("path", [README, CHINESE], ids=name)
def test_the_recipes_of_a_readme_have_these_parameters(path: Path) -> None:
    rows = re.findall(r"^\| `(pretrain/recipes/\S+)` \| (\S.*?) \|", path.read_text(encoding="utf-8"), re.MULTILINE)
    assert [recipe for recipe, _ in rows if (ROOT / recipe) in RECIPES] == [recipe for recipe, _ in rows]
    assert len(rows) == len(RECIPES)
    for recipe, stated in rows:
        count = parameter_count(load_recipe(ROOT / recipe).model)
        assert stated in (f"{count:,}", f"{count / 1e6:.1f} M"), recipe


def test_comments_are_no_commands() -> None:
    text = "```sh\n# only words\nmake demo    # words\n\npython a \\\n    --b\n```\n"
    assert command_lines(text) == ["make demo", "python a --b"]


# ---------------------------------------------------------------- files and links


def missing_files(text: str) -> list[str]:
    """Paths below the project's folders, and .py and .md files anywhere, that are named and are not there."""
    base_names = {path.name for folder in (*PACKAGES, "tests", "docs") for path in (ROOT / folder).rglob("*.*")}
    base_names |= {path.name for path in ROOT.glob("*.md")}
    missing = []
    for token in re.findall(r"[\w.-]+(?:/[\w.-]+)*/?", text):
        token = token.rstrip(".")
        first, slash, _ = token.partition("/")
        if slash and first in OURS:
            exists = (ROOT / token).exists()
        elif token.endswith((".py", ".md")):
            exists = (ROOT / token).exists() or token in base_names
        else:
            continue
        if not exists:
            missing.append(token)
    return missing


@pytest.mark.parametrize("path", [README, CHINESE, ARCHITECTURE, ROOT / "docs" / "dependencies.md"], ids=name)
def test_named_files_exist(path: Path) -> None:
    assert not missing_files(path.read_text(encoding="utf-8"))


def test_the_rule_sees_a_missing_file() -> None:
    assert missing_files("see model/attention.py, model/atention.py and docs/none/.") == [
        "model/atention.py",
        "docs/none/",
    ]
    assert missing_files("codec.py, codecs.py; runs/x/state.py") == ["codecs.py", "runs/x/state.py"]


def test_the_layout_is_what_is_there() -> None:
    """Every module stands in ARCHITECTURE.md's layout under its package, and nothing else does."""
    blocks = [content for _, content in code_blocks(ARCHITECTURE.read_text(encoding="utf-8"))]
    (layout,) = (block for block in blocks if "transformer.py" in block)
    listed: dict[str, set[str]] = {}
    folder = ""
    for line in filter(str.strip, layout.splitlines()):
        entry = line.split()[0]
        if not line.startswith(" "):
            folder = entry.rstrip("/")
        listed.setdefault(folder, set())
        if line.startswith(" "):
            listed[folder].add(entry)
    for package in PACKAGES:
        modules = {path.name for path in (ROOT / package).glob("*.py")} - {"__init__.py"}
        folders = {f"{path.name}/" for path in (ROOT / package).iterdir() if path.is_dir() and path.name[0] not in "._"}
        assert listed[package] - {"Dockerfile"} == modules | folders, package
    assert all((ROOT / folder).is_dir() for folder in listed)


def slugs(text: str) -> set[str]:
    """The anchors that GitHub gives to headings."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(path: Path, text: str) -> list[str]:
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"https?:|mailto:", link):
            continue
        target, _, anchor = link.partition("#")
        file = path.parent / target if target else path
        if not file.exists() or (anchor and anchor not in slugs(file.read_text(encoding="utf-8"))):
            broken.append(link)
    return broken


@pytest.mark.parametrize("path", [*PAPERS, ROOT / "data_pipeline" / "sample_corpus" / "SOURCES.md"], ids=name)
def test_links_resolve(path: Path) -> None:
    assert not broken_links(path, path.read_text(encoding="utf-8"))


def test_the_rule_sees_a_broken_link() -> None:
    text = "[a](docs/formats.md) [b](docs/none.md) [c](docs/formats.md#recipes) [d](docs/formats.md#nothing)"
    assert broken_links(README, text) == ["docs/none.md", "docs/formats.md#nothing"]


# ---------------------------------------------------------------- recipe keys


def documented_keys() -> dict[str, str]:
    """Key → default, from the recipe table of docs/formats.md; without `preset`, which is no field."""
    text = (ROOT / "docs" / "formats.md").read_text(encoding="utf-8").split("## Recipes")[1]
    rows = re.findall(r"^\| `([\w.\[\]]+)` \| .*? \| (\S+) \|", text, re.MULTILINE)
    return {key: default.strip("`") for key, default in rows if key != "model.preset"}


def known_keys(table: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, field in table.model_fields.items():
        kind = field.annotation
        if kind is ModelConfig:
            for size in fields(ModelConfig):
                default = "required" if size.default is MISSING else json.dumps(size.default)
                yield f"model.{size.name}", default
        elif hasattr(kind, "model_fields"):
            yield from known_keys(kind, f"{prefix}{key}.")
        elif field.is_required():
            yield prefix + key, "required"
        else:
            default = field.default
            yield prefix + key, "absent" if default is None else json.dumps(default)
            for element in get_args(kind):
                if hasattr(element, "model_fields"):
                    yield from known_keys(element, f"{prefix}{key}[].")


def test_recipe_keys_are_documented_with_their_defaults() -> None:
    assert documented_keys() == dict(known_keys(RunConfig))


# ---------------------------------------------------------------- nothing of a machine


def test_no_file_speaks_of_a_machine() -> None:
    files = [path for folder in OURS for path in (ROOT / folder).rglob("*") if path.is_file()]
    files += [path for pattern in TOP for path in ROOT.glob(pattern)]
    built = (".so", ".pyd", ".png")
    texts = [path for path in files if "__pycache__" not in path.parts and path.suffix not in (".jsonl", *built)]
    assert len(texts) > 100
    spoken = {
        name(path): found[0]
        for path in texts
        if (found := MACHINE_PATHS.search(path.read_text(encoding="utf-8", errors="replace")))
    }
    assert not spoken


def test_the_rule_sees_a_machine_path() -> None:
    assert MACHINE_PATHS.search("cd " + "/ho" + "me/someone/zerohalf")
    assert not MACHINE_PATHS.search("models work/life and https://example.org/homework/")
