"""Text as a list of blocks, shown on a terminal or written as Markdown or HTML."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, Group
    from rich.table import Table

_SPECIAL: Final = re.compile(r"[*`|]|(?<!\w)_|_(?!\w)")
"""Characters with a meaning in Markdown. An underscore within a word has none."""
_LEAST_NOTE: Final = 32
"""Minimum terminal columns for sentences in a table."""
Value = str | tuple[str, str]
"""A text, or a text and its style."""


@dataclass(frozen=True, slots=True)
class Heading:
    """The heading's text."""

    text: str


@dataclass(frozen=True, slots=True)
class TextLine:
    """A line of text, with a rich style for the terminal. Bold is also bold in Markdown."""

    text: str
    style: str = ""


@dataclass(frozen=True, slots=True)
class Grid:
    """A table. All columns are numbers except those in `left`."""

    heads: Sequence[str]
    rows: Iterable[Sequence[Value]]
    left: Collection[int] = (0,)
    notes_of: int | None = None
    """Number of columns that name a row, if the last has sentences. A terminal that is too narrow lists those below."""


@dataclass(frozen=True, slots=True)
class Items:
    """A list with a title. A terminal shows at most `most` items. `folded` Markdown only shows the title."""

    title: str
    lines: Sequence[TextLine]
    most: int | None = None
    folded: bool = False


@dataclass(frozen=True, slots=True)
class ToPaste:
    """Words of a command line, kept on one line."""

    text: str


Block = Heading | TextLine | Grid | Items | ToPaste


def on_terminal(blocks: Iterable[Block]) -> Group:
    from rich.console import Group

    return Group(*(part for block in blocks for part in _shown(block)))


def _shown(block: Block) -> Iterator[Any]:
    from rich.padding import Padding
    from rich.text import Text

    if isinstance(block, Heading):
        yield Text(block.text, "bold")
    elif isinstance(block, TextLine):
        yield Text(block.text, block.style)
    elif isinstance(block, ToPaste):
        yield Text(f"  {block.text}", "bold", no_wrap=True, overflow="ignore")
    elif isinstance(block, Grid):
        yield from (Text(), _OnTerminal(block))
    elif block.lines:
        yield Text(f"\n{block.title}", "bold")
        shown = block.lines[: block.most]
        yield from (Padding(Text(line.text, line.style), (0, 0, 0, 2), expand=False) for line in shown)
        if len(shown) < len(block.lines):
            yield Text(f"  and {len(block.lines) - len(shown)} more: --format csv has all", "dim")


class _OnTerminal:
    """A grid as a rich table. Sentences are the last column, or a list below if it is too narrow."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self.rows = [[(value, "") if isinstance(value, str) else value for value in row] for row in grid.rows]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Any]:
        from rich.measure import Measurement
        from rich.padding import Padding
        from rich.text import Text

        def room(columns: int) -> int:
            table = self._table(columns)
            return options.max_width - Measurement.get(console, options.update(width=1 << 12), table).maximum

        grid, columns = self.grid, len(self.grid.heads)
        longest = max((len(row[-1][0]) for row in self.rows), default=0)
        if grid.notes_of is None or room(columns - 1) >= min(_LEAST_NOTE, longest):
            yield self._table(columns)
            return
        known = range(columns - 1, grid.notes_of, -1)
        shown = next((each for each in known if room(each) >= 0), grid.notes_of + 1)
        yield self._table(shown)
        if dropped := [head for head in grid.heads[shown:-1] if head]:
            yield Text(also_shown(dropped), "dim")
        for row in self.rows:
            note = Text.assemble(" ".join(text for text, _ in row[: grid.notes_of]), ": ", row[-1])
            yield Padding(note, (0, 0, 0, 2), expand=False)

    def _table(self, columns: int) -> Table:
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
        for place, head in enumerate(self.grid.heads[:columns]):
            number = place not in self.grid.left
            table.add_column(head, justify="right" if number else "left", no_wrap=number, overflow="fold")
        for row in self.rows:
            table.add_row(*(Text(*value) for value in row[:columns]))
        return table


def as_markdown(blocks: Iterable[Block]) -> str:
    return "\n".join(line for block in blocks for line in _written(block)).rstrip() + "\n"


def _written(block: Block) -> Iterator[str]:
    if isinstance(block, Heading):
        yield from (f"### {escaped(block.text)}", "")
    elif isinstance(block, TextLine):
        text = escaped(block.text)
        yield from (f"**{text[0].upper()}{text[1:]}**" if "bold" in block.style else text, "")
    elif isinstance(block, ToPaste):
        yield from (f"`{block.text}`", "")
    elif isinstance(block, Grid):
        rule = ["---" if place in block.left else "---:" for place in range(len(block.heads))]
        rows = ([value if isinstance(value, str) else value[0] for value in row] for row in block.rows)
        cells = ([f"`{first}`", *map(escaped, rest)] for first, *rest in rows)
        yield from (f"| {' | '.join(row)} |" for row in (block.heads, rule, *cells))
        yield ""
    elif block.lines:
        title = block.title[0].upper() + block.title[1:]
        yield from (f"<details><summary>{title}</summary>" if block.folded else f"**{title}**", "")
        yield from (f"- {escaped(line.text)}" for line in block.lines)
        yield from ("", "</details>", "") if block.folded else ("",)


def escaped(text: str) -> str:
    """`text` escaped for Markdown, on one line."""
    return _SPECIAL.sub(r"\\\g<0>", " ".join(text.split())).replace("<", "&lt;")


def as_html(blocks: Iterable[Block]) -> str:
    """The blocks as HTML below a heading of the second level. Styles become classes: good, bad, quiet, caution."""
    return "\n".join(line for block in blocks for line in _marked_up(block))


def _marked_up(block: Block) -> Iterator[str]:
    from html import escape  # it loads a table of all HTML characters, which only pages need

    if isinstance(block, Heading):
        yield f"<h3>{escape(block.text)}</h3>"
    elif isinstance(block, TextLine):
        yield f"<p{_class(block.style)}>{escape(block.text)}</p>" if block.text else ""
    elif isinstance(block, ToPaste):
        yield f"<pre>{escape(block.text)}</pre>"
    elif isinstance(block, Grid):
        classes = ["" if place in block.left else "number" for place in range(len(block.heads))]
        yield f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(block.heads[0])}"><table><thead><tr>'
        yield "".join(
            f'<th scope="col" class="{kind}">{escape(head)}</th>'
            for head, kind in zip(block.heads, classes, strict=True)
        )
        yield "</tr></thead><tbody>"
        for row in block.rows:
            (first, _), *rest = ((value, "") if isinstance(value, str) else value for value in row)
            cells = (
                f'<td class="{kind} {_STYLES.get(style, "")}">{escape(text)}</td>'
                for (text, style), kind in zip(rest, classes[1:], strict=True)
            )
            yield f'<tr><th scope="row">{escape(first)}</th>{"".join(cells)}</tr>'
        yield "</tbody></table></div>"
    elif block.lines:
        yield f"<details><summary>{escape(block.title.capitalize())}: {len(block.lines)}</summary><ul>"
        yield from (f"<li{_class(line.style)}>{escape(line.text)}</li>" for line in block.lines)
        yield "</ul></details>"


_STYLES: Final = {
    "green": "good",
    "bold green": "good",
    "bold red": "bad",
    "red": "bad",
    "dim": "quiet",
    "yellow": "caution",
}
"""rich style -> class of the page."""


def _class(style: str) -> str:
    return f' class="{_STYLES[style]}"' if style in _STYLES else ""


def also_shown(heads: Sequence[str]) -> str:
    """The sentence below a table that has no room for the columns with these heads."""
    return f"A wider terminal also shows {', '.join(heads)}"
