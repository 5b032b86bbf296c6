"""Adds to the site the pages outside `docs/` and the files that pages link to.

The pages are written for GitHub, where a link is a path in the repository. The site also has README.md, CONTRIBUTING.md and
CHANGELOG.md, and copies other linked files outside `docs/` into `repository/`. `mkdocs.yml` names this module under `hooks`.
"""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path
from typing import Any, Final

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT: Final = Path(__file__).resolve().parents[1]
ROOT_PAGES: Final = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/README.md": "benchmarks.md",
}
"""Path in the repository -> page of the site."""
_REPOSITORY_PATHS: Final = {page: path for path, page in ROOT_PAGES.items()}
_LINK: Final = re.compile(r"(\]\()(?!https?:|#)([^)\s#]+)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages of the repository's root."""
    for path, page in ROOT_PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: Any, files: Files) -> str:
    """Rewrite the links of a page to paths in the site."""
    source = page.file.src_uri
    folder = posixpath.dirname(_REPOSITORY_PATHS.get(source, f"docs/{source}"))

    def link(match: re.Match[str]) -> str:
        target = _in_site(posixpath.normpath(posixpath.join(folder, match[2])), config, files)
        return match[1] + posixpath.relpath(target, posixpath.dirname(source) or ".")

    return _LINK.sub(link, markdown)


def _in_site(path: str, config: Any, files: Files) -> str:
    """The place of a repository path in the site."""
    if path in ROOT_PAGES:
        return ROOT_PAGES[path]
    if path.startswith("docs/") and not path.endswith(".py"):
        return path.removeprefix("docs/")
    copy = f"repository/{path}"
    if (ROOT / path).is_file() and files.get_file_from_path(copy) is None:
        files.append(File.generated(config, copy, abs_src_path=os.fspath(ROOT / path)))
    return copy
