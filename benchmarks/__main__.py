"""Every benchmark in its short form, and one table of what they find.

    python -m benchmarks [NAME]... [--out DIR]     what `make bench` does; NAMEs alone, the others' figures stay
    python -m benchmarks --page                    writes the table of the last run into docs/performance.md

Each runs by itself, so that none disturbs another; its whole report and what it says lie in DIR, beside table.json and
table.md, which are written anew behind each. Ends with 1 where one failed or is beyond its own limits.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from benchmarks.short import BENCHMARKS, REPORT, WORK, Short

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "performance.md"
BEGIN, END = "<!-- the table: python -m benchmarks --page -->", "<!-- the table's end -->"
LIMIT_SECONDS = 600
LIBRARIES = ("torch", "deepspeed", "transformers", "sentencepiece", "numpy", "datasets")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(BENCHMARKS)}")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "benchmarks", help="where reports and table go")
    parser.add_argument("--page", action="store_true", help="write the table of --out into docs/performance.md")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.names if name not in BENCHMARKS]
    if unknown:
        parser.error(f"no benchmark {unknown[0]!r}: there are {', '.join(BENCHMARKS)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that what runs is ended too
    try:
        if options.page:
            write_page(PAGE, read(options.out))
            return
        table = read(options.out) if options.names else {}
        for name in options.names or BENCHMARKS:
            table[name] = run(name, BENCHMARKS[name], options.out)
            write(options.out, {name: table[name] for name in BENCHMARKS if name in table})
    except OSError as error:
        sys.exit(f"error: {error}")
    print(to_text(read(options.out)))
    sys.exit(any(table[name]["failure"] is not None for name in options.names or BENCHMARKS))


# ---------------------------------------------------------------- running


def run(name: str, short: Short, out: Path) -> dict[str, Any]:
    """One benchmark's entry in the table."""
    out.mkdir(parents=True, exist_ok=True)
    report, log = out / f"{name}.json", out / f"{name}.log"
    report.unlink(missing_ok=True)
    load, started = os.getloadavg()[0], time.monotonic()
    print(f"{name} …", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(prefix="zerohalf-benchmark-") as work, log.open("w") as said:
        places = {REPORT: str(report), WORK: work}
        argv = [sys.executable, str(ROOT / "benchmarks" / f"{name}.py"), *(places.get(a, a) for a in short.arguments)]
        printed = Path(work) / "printed"
        code = ended(argv, printed, said)
        failure = None if code == 0 else f"ended with {code}: {last_line(log)}"
        if code is None:
            failure = f"took more than {LIMIT_SECONDS} s"
        if REPORT not in short.arguments:
            report.write_text(json_in(printed.read_text(errors="replace")), encoding="utf-8")
    entry: dict[str, Any] = {"rows": [], "failure": failure}
    try:
        entry["rows"] = [asdict(row) for row in short.rows(json.loads(report.read_bytes()))]
    except (OSError, ValueError, KeyError) as error:  # no report, or half of one
        entry["failure"] = failure or f"no report that can be read: {type(error).__name__}: {error}"
    seconds = time.monotonic() - started
    print(f"{name}: {entry['failure'] or 'done'} in {seconds:.0f} s", file=sys.stderr, flush=True)
    return entry | {"seconds": seconds, "load": load, "at": datetime.now(UTC).isoformat(timespec="seconds")} | machine()


def ended(argv: list[str], printed: Path, said: IO[str]) -> int | None:
    """A command's exit code; None where it took too long. Nothing that it has started outlives it."""
    with printed.open("w") as out:
        process = subprocess.Popen(
            argv, cwd=ROOT, env={**os.environ, "DS_ACCELERATOR": "cpu"}, stdout=out, stderr=said, start_new_session=True
        )
    try:
        return process.wait(LIMIT_SECONDS)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def json_in(printed: str) -> str:
    """The report behind what libraries print: it begins with a bracket that has a line of its own."""
    lines = printed.splitlines()
    return "\n".join(lines[max((number for number, line in enumerate(lines) if line in ("{", "[")), default=0) :])


def last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip()[:200] if lines else "without a word"


def machine() -> dict[str, Any]:
    """Where and with what a benchmark ran."""
    return {
        "machine": f"{os.cpu_count()} × {processor()}, {memory_bytes() / 1e9:.0f} GB",
        "python": platform.python_version(),
        "commit": commit(),
        "versions": {name: version_of(name) for name in LIBRARIES},
    }


def processor() -> str:
    path = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*:\s*(.+)", path.read_text()) if path.exists() else None
    return found[1] if found else platform.processor() or platform.machine()


def memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def commit() -> str:
    git = ["git", "-C", str(ROOT), "rev-parse", "--short=10", "HEAD"]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def version_of(library: str) -> str | None:
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return None


# ---------------------------------------------------------------- the table


def read(out: Path) -> dict[str, Any]:
    """The entries so far, by benchmark."""
    path = out / "table.json"
    try:
        table: dict[str, Any] = json.loads(path.read_bytes()) if path.exists() else {}
    except ValueError as error:
        raise OSError(f"{path} is damaged ({error}): remove it, and run all benchmarks again") from None
    return table


def write(out: Path, table: dict[str, Any]) -> None:
    for name, text in (("table.json", json.dumps(table, indent=2)), ("table.md", to_text(table))):
        aside = out / f"{name}.partial"
        aside.write_text(text + "\n", encoding="utf-8")
        aside.replace(out / name)


def to_text(table: dict[str, Any]) -> str:
    """The entries as a table in Markdown, and what they were measured with."""
    lines = ["| benchmark | what | ours | against |", "|---|---|---|---|"]
    for name, entry in table.items():
        lines += [
            f"| `{name}.py` | {row['what']} | {show(row['ratio'])} | {row['reference']} |" for row in entry["rows"]
        ]
        if entry["failure"] is not None:
            lines.append(f"| `{name}.py` | **failed** | | {entry['failure'].replace('|', '/')} |")
    lines.append("")
    entries = list(table.values())
    for key, told in (("machine", "Machine"), ("python", "Python"), ("commit", "Commit")):
        lines.append(f"{told}: {'; '.join(dict.fromkeys(str(entry[key]) for entry in entries))}.  ")
    versions = dict.fromkeys(
        ", ".join(f"{name} {version}" for name, version in entry["versions"].items() if version) for entry in entries
    )
    lines.append(f"Versions: {'; '.join(versions)}.  ")
    when = sorted(entry["at"] for entry in entries)
    loads = [entry["load"] for entry in entries]
    if when:
        lines.append(
            f"Measured {when[0]} to {when[-1]}, {sum(entry['seconds'] for entry in entries):.0f} s in all; load of the "
            f"machine before each {min(loads):.1f} to {max(loads):.1f}."
        )
    return "\n".join(lines)


def show(ratio: float) -> str:
    """Three figures, and no more than four places."""
    return f"{ratio:.4f}" if abs(ratio) < 0.01 else f"{ratio:.3g}" if abs(ratio) < 100 else f"{ratio:,.0f}"


def write_page(page: Path, table: dict[str, Any]) -> None:
    """Put the table where the page has the last one. OSError: there is none, or the page has no place for it."""
    if not table:
        raise OSError("there is no table yet: run `make bench` first")
    text = page.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, behind = rest.partition(END)
    if not begin or not end:
        raise OSError(f"{page} has no lines {BEGIN} and {END}")
    aside = page.with_name(page.name + ".partial")
    aside.write_text(f"{before}{begin}\n\n{to_text(table)}\n\n{end}{behind}", encoding="utf-8")
    aside.replace(page)


if __name__ == "__main__":
    main()
