"""Hooks of mkdocs: the site has README and the other files outside docs/ that pages link to.

A link of a page is right on disk (tests/unit/test_docs.py): ``../README.md``, ``../examples/own_loop.py``.
On the site README is ``index.md``, and a script that somebody links to is a file to download.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
DOWNLOADS = "repository"
"""Folder of the site that holds linked files from outside docs/."""
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
"""Markdown files of the repository's root -> pages of the site."""
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")
CODE = re.compile(r"(^```.*?^```$|`[^`\n]*`)", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the root's pages, and the files outside docs/ that pages link to."""
    for source, target in PAGES.items():
        files.append(File.generated(config, target, abs_src_path=str(ROOT / source)))
    linked = set()
    for page in [ROOT / source for source in PAGES] + sorted((ROOT / "docs").rglob("*.md")):
        for _, _, target, _ in LINK.findall(CODE.sub("", page.read_text())):
            path = _in_repository(target, page.relative_to(ROOT).as_posix())
            if not path.startswith("docs/") and path not in PAGES and (ROOT / path).is_file():
                linked.add(path)
    for path in sorted(linked):
        files.append(File.generated(config, f"{DOWNLOADS}/{path}", abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links that are right on disk into links that are right on the site."""
    sources = {target: source for source, target in PAGES.items()}
    source = sources.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    folder = posixpath.dirname(page.file.src_uri) or "."

    def on_site(match: re.Match) -> str:
        image, text, target, anchor = match.groups()
        path = _in_repository(target, source)
        if "://" in target:
            return match[0]
        if path in PAGES:
            place = PAGES[path]
        elif path.startswith("docs/"):
            place = path.removeprefix("docs/")
        else:
            place = f"{DOWNLOADS}/{path}"
        if (ROOT / path).is_dir():  # the site has no listings of folders
            return text
        return f"{image}[{text}]({posixpath.relpath(place, folder)}{anchor or ''})"

    pieces = CODE.split(markdown)
    return "".join(piece if CODE.fullmatch(piece) else LINK.sub(on_site, piece) for piece in pieces)


def _in_repository(target: str, source: str) -> str:
    """The path from the repository's root of what ``source``, a path from there, links to."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
