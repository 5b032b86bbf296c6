"""The documentation as a site: every page has its place, every link leads somewhere, and nothing is fetched."""

from __future__ import annotations

import html.parser
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
WRITTEN = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
GENERATED = {f"reference/{name}.md" for name in ("commands", "settings", "json")}
URL = re.compile(r"https?://[^\s)>\"'`|\]]+")
FETCHED = {"img": "src", "script": "src", "iframe": "src", "source": "src", "link": "href", "object": "data"}
"""What a browser fetches of each element without being asked."""


class _Config(yaml.SafeLoader):
    """mkdocs.yml has tags that name Python functions."""


_Config.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: suffix)


def config() -> dict[str, Any]:
    return yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), _Config)


def in_nav(items: Any) -> Iterator[str]:
    """The pages of the navigation, in order."""
    match items:
        case str():
            yield items
        case list():
            for item in items:
                yield from in_nav(item)
        case dict():
            for item in items.values():
                yield from in_nav(item)


class _Elements(html.parser.HTMLParser):
    """The elements of a page that make a browser fetch something, its links and its anchors."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        if "id" in given:
            self.anchors.add(given["id"])
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif tag in FETCHED and FETCHED[tag] in given:
            self.fetched.append(given[FETCHED[tag]])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site. Fails if MkDocs warns of anything."""
    pytest.importorskip("material", reason="extra [docs]")
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


def test_every_page_has_its_place_in_the_navigation() -> None:
    pytest.importorskip("mkdocs", reason="extra [docs]")
    from site_pages import ROOT_PAGES

    pages = list(in_nav(config()["nav"]))
    assert len(pages) == len(set(pages)), "a page has one place"
    assert set(pages) == WRITTEN | set(ROOT_PAGES.values())


def test_the_readme_lists_every_page() -> None:
    """Pages of decisions and of the project's measurements are listed by their own overviews."""
    text = (ROOT / "README.md").read_text(encoding="utf-8").partition("## Documentation")[2]
    listed = {name for name in WRITTEN if f"(docs/{name})" in text}
    for folder in ("decisions", "project"):
        overview = (ROOT / "docs" / folder / "README.md").read_text(encoding="utf-8")
        listed |= {name for name in WRITTEN if name.startswith(f"{folder}/") and f"({Path(name).name})" in overview}
    assert listed == WRITTEN


def test_reading_the_pages_takes_an_afternoon() -> None:
    """Reference, decisions and the project's own measurements are not in the reading order."""
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    assert sum(len(page.read_text(encoding="utf-8").split()) for page in pages) < 40_000
    assert len(pages) < 23


@pytest.mark.parametrize("name", sorted({*WRITTEN} - GENERATED))
def test_pages_use_the_terms_of_the_field(name: str) -> None:
    """Outside code, output, quoted messages and generated tables."""
    text = (ROOT / "docs" / name).read_text(encoding="utf-8")
    for code in (r"^```.*?^```", r"^    .*?$", r"<!-- generated: .*?<!-- end -->", r"`[^`]*`"):
        text = re.sub(code, "", text, flags=re.DOTALL | re.MULTILINE)
    assert re.findall(r"\d %|\b(?:folder|kept server|told|whoever|nobody|made up)\b", text) == []


@pytest.mark.thorough
def test_nothing_is_fetched_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        assert [url for url in _Elements(page).fetched if urlsplit(url).netloc] == [], page.name
    for sheet in site.rglob("*.css"):
        assert re.findall(r"url\(['\"]?(?:https?:)?//|@import", sheet.read_text(encoding="utf-8")) == [], sheet.name


@pytest.mark.thorough
def test_every_link_of_the_site_leads_somewhere(site: Path) -> None:
    """Also those of the navigation, and into files that are no pages."""
    pages = {page: _Elements(page) for page in site.rglob("*.html")}
    for page, found in pages.items():
        for link in [*found.links, *found.fetched]:
            target = urlsplit(link)
            if target.scheme in {"http", "https"} or page.name == "404.html":
                continue
            assert not target.scheme, f"{page.name}: {link}"
            file = (page.parent / target.path).resolve() if target.path else page
            assert file.exists(), f"{page.name}: {link}"
            if target.fragment and file in pages:
                assert target.fragment in pages[file].anchors, f"{page.name}: {link}"


@pytest.mark.thorough
def test_the_site_has_the_tables_and_no_markdown_left(site: Path) -> None:
    """MkDocs' dialect takes a table or list without a blank line before it for text."""
    for page in site.rglob("*.html"):
        text = re.sub(r"<(pre|code|script)\b.*?</\1>", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        assert re.findall(r"^(?:<p>)?\s*(?:\|.*\||- \w.*|#{1,4} .*|```.*)$", text, re.MULTILINE) == [], page.name
        assert "](" not in text, page.name


@pytest.mark.parametrize("page", [*(f"docs/{name}" for name in sorted(WRITTEN)), "README.md", "CONTRIBUTING.md"])
def test_addresses_elsewhere_are_well_formed(page: str) -> None:
    """They are not contacted: a test must not depend on another machine."""
    path = ROOT / page
    for address in URL.findall(path.read_text(encoding="utf-8")):
        url = urlsplit(address.rstrip(".,;:").replace(":PORT", ":1"))
        assert url.hostname, address
        assert re.fullmatch(r"[A-Za-z0-9.-]+|[0-9a-f:]+", url.hostname), address
        assert url.port is None or url.port > 0, address
        if f"]({address}" in path.read_text(encoding="utf-8"):
            assert url.scheme == "https", f"{address}: a link that anyone on the way can change"
            assert "." in url.hostname, address
