"""The errors in a log, by its form alone: which lines are statements of a failure, and which of them came first.

No words of a particular failure are known here, only the forms in `data/statements.yaml`: Python's tracebacks and their
chains, C++ exceptions and assertions, severities of loggers, errors of command lines, events of a cluster, the wrappers
of Triton, executors, containers and clients around others' words, and consequences of another process's failure.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import cache
from itertools import takewhile
from typing import Final

from trtllm_pipeline import PACKAGE
from trtllm_pipeline.tensorrt.diagnosis.signatures import read_yaml


class Grade(IntEnum):
    """How informative a statement is about the cause. The lowest grade that is present counts."""

    OWN = 0
    """Names the error in its own words."""
    PASSED_ON = 1
    """The same, forwarded by a client from its server, or printed by a script that may continue."""
    BARE = 2
    """Reports an error with hardly any detail: a crash, `'NoneType' object has no attribute`."""
    FAINT = 3
    """Reports a problem, but not as an error."""
    WARNED = 4
    """The same, as a warning."""
    ENDED = 5
    """Names the process that died, or the check that failed with a skip. Reported only without a better statement."""
    FOLLOWS = 6
    """Reports that something else has failed."""


@dataclass(frozen=True, slots=True)
class Statement:
    """A place in a log that reports a failure."""

    grade: Grade
    index: int
    """The line with the words, counted from 0."""
    first: int
    """The first line that belongs to it, such as the head of its traceback ..."""
    last: int
    """... and the last one."""
    text: str
    """Its words, without wrappers."""
    when: tuple[str, ...] = ()
    """Time of the writer, month, day and time, from its line or an earlier one."""
    raised: tuple[int, ...] = ()
    """In a traceback, the lines of its exceptions and their messages."""
    announced: bool = False
    """True if the line above reports a part that is left out, and the log ends here: survived or not."""
    until: int | None = None
    """With several exceptions, the last line of the message of the one that counts."""

    @property
    def words(self) -> Sequence[int]:
        """The lines of its words. In a traceback, without the code and without lines of other writers."""
        return self.raised or range(self.first, self.last + 1)

    @property
    def own(self) -> range:
        """The lines of the exception that counts, if there are several."""
        return range(
            self.first if self.until is None else self.index, (self.last if self.until is None else self.until) + 1
        )


@dataclass(frozen=True, slots=True)
class _Line:
    """A line without the prefix of loggers, launchers and containers."""

    index: int
    stream: str
    """Its writer, if the line shows it: its rank or process."""
    severity: str
    """E, W, I, or empty."""
    body: str
    """The text with its indentation."""
    when: tuple[str, ...]
    shouted: bool
    """True if it starts with `ERROR:`, like the output of scripts and installers."""
    continued: bool
    """True if it continues a message of several lines, each written with the same time and location."""
    above: int
    """The previous line of the same writer, without blank ones. -1 without any."""

    @property
    def indent(self) -> int:
        """Number of spaces before its text."""
        return len(self.body) - len(self.body.lstrip())


@dataclass(slots=True)
class _Traceback:
    """A traceback that is being parsed."""

    first: int
    indent: int
    harmless: bool
    """True if the lines above report that it is harmless."""
    strangers: int = 0


@dataclass(slots=True)
class _Raised:
    """The exceptions of a chain of tracebacks: the index and text of each line, and its relation to the one before."""

    first: int
    harmless: bool
    """True if the line above reports that the program goes on without the failed part, and it did."""
    raised: list[tuple[int, str]] = field(default_factory=list)
    more: list[str] = field(default_factory=list)
    """Continuation of the last message."""
    words: list[int] = field(default_factory=list)
    """All their lines."""
    last: int = 0
    linked: bool = False
    """True if the next one comes from it."""
    announced: bool = False
    open: bool = True
    """True if the lines below may continue its message."""
    when: tuple[str, ...] = ()

    def add(self, index: int, text: str) -> None:
        """The next exception."""
        self.raised.append((index, text))
        self.words.append(index)
        self.more.clear()
        self.last, self.linked, self.open = index, False, True


_PARAGRAPH: Final = 10
"""Maximum lines of a statement."""
_LONGEST: Final = 4000
"""Characters of a line that are read."""


@cache
def _forms() -> Mapping[str, str]:
    """Regular expressions of `data/statements.yaml`, by name."""
    forms: dict[str, str] = read_yaml(PACKAGE / "data" / "statements.yaml")
    return {name: "|".join(lines.splitlines()) for name, lines in forms.items()}


@cache
def _compiled(name: str) -> re.Pattern[str]:
    return re.compile(_forms()[name])


def links_exceptions(line: str) -> bool:
    """True for a line between two exceptions of a chain."""
    return _compiled("link").search(line) is not None


def statements(lines: Sequence[str], noise: Container[int] = ()) -> list[Statement]:
    """All statements of a log, in their order. Only the time is read from `noise`."""
    parsed = list(_parsed(lines, noise))
    chains, inside = _tracebacks(parsed)
    collected = [*map(_of_chain, chains), *_cut_off(parsed)]
    heads = {chain.first: chain for chain in chains}
    below = {line.above: line for line in parsed}
    ruled = False
    for line in parsed:
        under = below.get(line.index)
        while under is not None and _compiled("titled").search(under.body) and under.index in below:
            under = below[under.index]
        each = None if line.index in inside else _of_line(line, under)
        if each is None and ruled and line.index not in inside:
            each = _of_paragraph(line, parsed)
        if each is not None and each.text == "AssertionError":
            each = replace(each, text=f"{each.text}{_asserted(parsed, line)}")
        if ruled and each is not None and each.grade is Grade.FAINT and not line.body.startswith("WARNING"):
            each = _of_help(each, parsed)
        ruled = line.body.startswith("--------------------")
        if each is not None and (each.grade is Grade.BARE or not _announces(line, heads)):
            collected.append(_with_neighbors(each, line, parsed, inside))
    collected = sorted(collected, key=lambda each: each.index)
    first = next((place for place, each in enumerate(collected) if each.grade is not Grade.WARNED), None)
    raised = first is not None and any(each.raised for each in collected[first:])
    if first is not None and raised and _compiled("shell killed").match(parsed[collected[first].index].body):
        # The next program of the script fails because of it.
        collected[first] = replace(collected[first], grade=Grade.OWN)
    return _led_up(_with_reasons(collected, parsed), parsed)


def _with_neighbors(each: Statement, line: _Line, lines: Sequence[_Line], inside: set[int]) -> Statement:
    """A statement with its lines around: indented ones below, code above an exception, a validation error's details."""
    each = replace(each, last=max(each.last, _end(lines, line.index, inside)))
    if code := [*_code_above(lines, line)] if _compiled("exception").match(line.body) else []:
        each = replace(each, first=code[-1], raised=tuple(range(each.index, each.last + 1)), until=each.last)
    below = lines[each.index + 1 : each.index + 3]
    traced = any(_compiled("head").match(after.body) for after in below)
    if "validation error" in each.text and not traced and any(after.indent > line.indent for after in below):
        each = replace(each, text=" ".join([each.text, *(after.body.strip() for after in below)]))
    return each


def _with_reasons(collected: list[Statement], lines: Sequence[_Line]) -> list[Statement]:
    """A title such as "Caused by:" replaces the vague line above it. Advice below an error belongs to it. A stop from outside after
    a crash only follows from it. If the last retry failed just above, it is the reason that nothing was found.
    """
    for place, each in enumerate(collected[1:], start=1):
        above = collected[place - 1]
        if _compiled("reason").match(lines[each.first].body) and each.first - above.last <= 2:
            collected[place - 1] = replace(above, grade=Grade.FOLLOWS)
            collected[place] = replace(each, first=above.first)
        if _compiled("advice").match(lines[each.first].body.strip()) and lines[each.first].above == above.last:
            collected[place - 1], collected[place] = _advised(above, each), replace(each, grade=Grade.FOLLOWS)
        if _compiled("tried").search(above.text) and _compiled("nothing found").search(each.text):
            collected[place - 1] = replace(above, grade=Grade.OWN)
        if _compiled("stopping").search(each.text) and any(one.grade is Grade.BARE for one in collected[:place]):
            collected[place] = replace(each, grade=Grade.ENDED)
    return collected


def _advised(error: Statement, advice: Statement) -> Statement:
    """An error with the lines of the advice below it."""
    raised = (*error.raised, *advice.words) if error.raised else ()
    return replace(error, last=advice.last, raised=raised, until=None if error.until is None else advice.last)


def _led_up(collected: list[Statement], lines: Sequence[_Line]) -> list[Statement]:
    """Adds the lines right above an error to it. If a function reports a failure there, its line belongs to the error: libraries
    without a logger report an error from the innermost function outwards, one line each. If it quotes another program, the
    lines above are only consequences.
    """
    places = {each.last: place for place, each in enumerate(collected)}
    for place in range(len(collected) - 1, -1, -1):
        line = lines[collected[place].first]
        while line.above >= 0 and _compiled("quoted").search(lines[line.above].body):
            line = lines[line.above]
        above = places.get(line.above)
        if above is None or collected[place].grade > Grade.FAINT:
            continue
        quoting = _compiled("quotes").search(lines[line.above].body) is not None
        while quoting and above is not None:
            collected[above] = replace(collected[above], grade=Grade.FOLLOWS)
            above = places.get(lines[collected[above].first].above)
        if above is None:
            continue
        before = lines[line.above]
        function = not (before.severity or line.severity) and _compiled("function").match(before.body)
        if function and collected[place].grade in {Grade.OWN, Grade.BARE} and collected[above].grade is Grade.FAINT:
            collected[above] = replace(collected[above], grade=Grade.OWN)
    return collected


def _end(lines: Sequence[_Line], index: int, inside: set[int]) -> int:
    """The last line of the statement at `index`: indented lines below continue it."""
    last = index
    for line in lines[index + 1 : index + _PARAGRAPH]:
        deeper = line.indent > lines[index].indent and not line.severity and line.index not in inside
        if not deeper or not line.body.strip() or _compiled("frame").search(line.body):
            break
        last = line.index
    return last


def _announces(line: _Line, heads: Mapping[int, _Raised]) -> bool:
    """True if a line only announces the traceback below it."""
    below = next((heads[line.index + n] for n in (0, 1, 2) if line.index + n in heads), None)
    if below is None or below.harmless or line.index >= below.raised[0][0]:
        return False
    title = _compiled("head").sub("", unwrapped(line.body)).strip()
    if any(title and title in text for _, text in below.raised):
        return all(title != text for _, text in below.raised)
    if any(message and message in title for message in (text.partition(": ")[2] for _, text in below.raised)):
        return True
    return _compiled("said").search(title) is None and len(title.split()) <= 12


def first_statement(stated: Sequence[tuple[int, Statement]]) -> tuple[int, Statement] | None:
    """The first cause of (log, statement) pairs: the most specific, then the earliest.

    None if all are warnings or consequences.
    """
    causes = [(log, each) for log, each in stated if each.grade not in {Grade.WARNED, Grade.FOLLOWS}]
    if not causes:
        return None
    best = min(each.grade for _, each in causes)
    causes = [(log, each) for log, each in causes if each.grade is best]
    if best is Grade.FAINT:
        causes = _last_together(causes)
    firsts: dict[int, Statement] = {}
    for log, each in causes:
        if log not in firsts or each.index < firsts[log].index:
            firsts[log] = each
    timed = len({each.when[:1] for each in firsts.values()}) == 1
    return min(firsts.items(), key=lambda pair: (pair[1].when if timed else (), pair[0], pair[1].index))


def _last_together(causes: Sequence[tuple[int, Statement]]) -> list[tuple[int, Statement]]:
    """The last of possibly harmless statements, at the same time: a program that ends reports the reason at its end."""
    together = [causes[-1]]
    for log, each in reversed(causes[:-1]):
        if log != together[-1][0] or together[-1][1].index - each.last > 2:
            break
        together.append((log, each))
    return together


def _parsed(lines: Sequence[str], noise: Container[int]) -> Iterator[_Line]:
    when: tuple[str, ...] = ()
    before: dict[str, tuple[int, str]] = {}
    prefix = _compiled("prefix")
    for index, text in enumerate(lines):
        stream = severity = ""
        place = 0
        shouted = False
        while (match := prefix.match(text, place)) and match.end() > place:
            place = match.end()
            kind = match.lastgroup
            if kind in {"task", "tag", "rank", "actor", "pod"}:
                stream += match[0].strip()
            elif kind in {"torch", "tf"}:
                severity = match[kind][0]
            elif kind == "glog":
                severity = match[0][0]
                when = (kind, match[0][1:3], match[0][3:5], match["clocked"]) if match["clocked"] else when
            elif kind == "iso":
                when = (kind, match["iso"][5:7], match["iso"][8:10], match["iso"][11:].replace(",", "."))
            elif kind == "us":
                when = (kind, match["us"][:2], match["us"][3:5], match["us"][11:])
            elif kind == "syslog":
                severity = match["level1"][0]
                when = (kind, match["day"][:2], match["day"][3:], match["clock"])
            elif kind is not None and kind != "clock2":
                shouted = match["level3"] == "ERROR" and match.start() == 0
                severity = match[kind][0].upper()
            if kind in {"iso", "clock2"} and (level := _compiled("level").match(text, place)):
                severity, place = level[1][0], level.end()
        body = "" if index in noise else flattened(text[place : place + _LONGEST].rstrip())
        written = text[:place]
        above, same = before.get(stream, (-1, ""))
        continued = written == same and _compiled("located").search(written) is not None
        if text[place:].strip():
            before[stream] = index, written
        yield _Line(index, stream, "E" if severity in {"F", "C"} else severity, body, when, shouted, continued, above)


def flattened(text: str) -> str:
    """The informative one of several lines that were written as one, with escaped line ends."""
    if r"\n" not in text:
        return text
    parts = [part for part in text.split(r"\n") if part.strip()]
    if any(_compiled("head").search(part) for part in parts):
        raised = [part for part in parts if _compiled("exception").match(part.strip())]
        return raised[0].strip() if raised else ""
    words = " ".join(part.strip() for part in parts[: 2 if _is_title(parts[0]) else 1])
    return next((part for part in parts if _compiled("hook").match(part)), words)


def _tracebacks(lines: Sequence[_Line]) -> tuple[list[_Raised], set[int]]:
    """Chains of tracebacks, and the lines that belong to any."""
    done: list[_Raised] = []
    inside: set[int] = set()
    reading: dict[str, _Traceback] = {}
    chains: dict[str, _Raised] = {}
    headed: _Line | None = None
    for line in lines:
        body = line.body.strip().strip('"')
        if headed is not None and line.index == headed.index + 1 and headed.stream and not line.stream:
            # A logger wrote only the head.
            reading[line.stream] = reading.pop(headed.stream)
        before, chain = reading.get(line.stream), chains.get(line.stream)
        if _compiled("head").search(line.body):
            alone = line.body.lstrip().startswith(("Traceback", "Exception Group"))
            harmless = _harmless(line) or (line.above >= 0 and _harmless(lines[line.above]))
            reading[line.stream], headed = _Traceback(line.index, line.indent if alone else 0, harmless), line
            if chain is not None:
                chain.open = False
            if alone or body.startswith("Traceback"):
                inside.add(line.index)
        elif before is not None:
            deep = _compiled("deep exception").match(body) is not None
            if not deep and (not body or line.indent > before.indent or _compiled("frame").search(line.body)):
                inside.add(line.index)
            elif _compiled("exception").match(body) and line.severity != "I":
                inside.add(line.index)
                del reading[line.stream]
                if chain is None or not chain.linked:
                    chain = chains[line.stream] = _Raised(before.first, before.harmless, when=line.when)
                    done.append(chain)
                chain.add(line.index, body if body != "AssertionError" else f"{body}{_asserted(lines, line)}")
            else:
                before.strangers += 1
                if before.strangers > 60:
                    del reading[line.stream]
        elif chain is not None:
            if links_exceptions(body):
                chain.linked = True
                inside.add(line.index)
            elif chain.linked and _compiled("exception").match(body):
                chain.add(line.index, body)
                inside.add(line.index)
            elif (
                chain.open
                and not chain.harmless
                and body
                and not line.severity
                and line.index - chain.last <= 6
                and (_goes_on(line) or (_is_title(chain.raised[-1][1]) and (line.indent > 0 or not chain.more)))
            ):
                chain.last = line.index
                chain.more.append(body)
                chain.words.append(line.index)
                inside.add(line.index)
            elif body:
                chain.open = False
    last_written = max((line.index for line in lines if line.body.strip()), default=0)
    for chain in done:
        above = lines[chain.first].above
        ignored = above >= 0 and _compiled("ignored").search(lines[above].body) is not None
        chain.announced = chain.harmless and not ignored and chain.last == last_written
        chain.harmless = chain.harmless and not chain.announced
    for line in lines:
        if line.index not in inside and _compiled("named").match(line.body):
            inside.update(_code_above(lines, line))
    return done, inside


def _cut_off(lines: Sequence[_Line]) -> Iterator[Statement]:
    """The exception of a traceback that the end of the log cuts off: the one that its last line of code raises."""
    last = next((line for line in reversed(lines) if line.body.strip()), None)
    raised = last and _compiled("raise").match(last.body.strip())
    if last and raised:
        first = min(_code_above(lines, last), default=last.index)
        yield Statement(Grade.OWN, last.index, first, last.index, f"{raised['error']}: {raised['words']}", last.when)


def _asserted(lines: Sequence[_Line], raised: _Line) -> str:
    """The condition of an assertion without a message, from the line of code above it. Empty if that is something else."""
    place = raised.above
    while place >= 0 and lines[place].body.strip().startswith("^"):
        place = lines[place].above
    code = lines[place].body.strip() if place >= 0 else ""
    return f": {code}" if code.startswith("assert ") else ""


def _code_above(lines: Sequence[_Line], raised: _Line) -> Iterator[int]:
    """The lines of code right above an exception, if the start of its traceback is missing."""
    place = raised.above
    while place >= 0 and lines[place].severity == raised.severity and lines[place].indent >= raised.indent + 2:
        yield place
        place = lines[place].above


def _harmless(above: _Line) -> bool:
    """True if a line above a traceback reports that the program continues without the failed part."""
    warned = above.severity == "W" and above.body.endswith(":")
    return warned or any(_compiled(name).search(above.body) for name in ("harmless", "ignored"))


def _is_title(text: str) -> bool:
    """True if the reason of an exception is in the lines below it."""
    return _compiled("explained").search(text) is not None


def _goes_on(line: _Line) -> bool:
    """True if a line below an exception continues its message."""
    body = line.body.strip()
    another = any(_compiled(name).search(body) for name in ("exception", "own", "named"))
    return not (another or line.stream or _compiled("frame").search(line.body))


def _of_chain(chain: _Raised) -> Statement:
    """The first informative one of chained exceptions. The last, if all before were lookups."""
    *before, (index, text) = raised = chain.raised
    if _is_title(text) and chain.more and _compiled("exception").match(chain.more[0]):
        raised = [*before, (index, f"{text} {chain.more[0]}")]
    graded = [(_grade_raised(text), _compiled("terse").match(text) is not None, index, text) for index, text in raised]
    grade, _, index, text = min(graded, key=lambda each: each[:3])
    if len(raised) > 2 and all(_compiled("looked up").match(text) for _, text in before):
        index, text = raised[-1]
        grade = _grade_raised(text)
    if chain.harmless or chain.announced:
        grade = max(grade, Grade.FAINT if chain.announced else Grade.WARNED)
    if _is_title(text) and index == raised[-1][0]:
        text = " ".join([text, *chain.more])
    until = max(
        line
        for line in chain.words
        if line < min((later for later, _ in chain.raised if later > index), default=line + 1)
    )
    return Statement(
        grade, index, chain.first, chain.last, unwrapped(text), chain.when, tuple(chain.words), chain.announced, until
    )


def _grade_raised(text: str) -> Grade:
    residue = unwrapped(text)
    if _compiled("follows").search(residue) or _compiled("follows").search(text):
        return Grade.ENDED if _compiled("ended").search(residue) else Grade.FOLLOWS
    if _compiled("bare").search(text):
        return Grade.BARE
    if _compiled("passed on").search(text):
        return Grade.PASSED_ON
    return Grade.OWN if residue.partition(":")[2].strip() or " " in residue else Grade.BARE


def _of_help(each: Statement, lines: Sequence[_Line]) -> Statement:
    """An error between rules, as in mpirun's help messages: an indented line of it has the reason."""
    for line in lines[each.index : each.index + 2 * _PARAGRAPH]:
        if line.body.startswith("--------------------"):
            break
        if line.indent and _compiled("faint").search(line.body):
            below = lines[line.index + 1] if line.index + 1 < len(lines) else line
            last = below.index if below.body.strip().startswith("-->") else line.index
            each = replace(each, index=line.index, last=last, text=unwrapped(line.body))
            break
    return replace(each, grade=Grade.OWN)


def _of_paragraph(line: _Line, lines: Sequence[_Line]) -> Statement | None:
    """The first paragraph below a rule, if it is prose and reports a problem after its first line."""
    below = (each for each in lines[line.index : line.index + _PARAGRAPH] if each.stream == line.stream)
    part = list(takewhile(lambda each: each.body.strip() and not (each.indent or each.severity), below))
    text = " ".join(each.body for each in part)
    if not text[:1].isupper() or _compiled("harmless").search(text) or not _compiled("faint").search(text):
        return None
    return Statement(Grade.OWN, line.index, line.index, part[-1].index, text, line.when)


def _of_line(line: _Line, below: _Line | None) -> Statement | None:
    """The statement of a line outside of tracebacks, or of the next line of the same writer, if this one is a title."""
    body = line.body.strip()
    if not body or _compiled("frame").search(line.body):
        return None
    went_on = below is not None and below.severity == "I"
    grade = _grade_line(body, line, went_on=went_on)
    if grade is None:
        return None
    if below is not None and _compiled("unfinished").search(body):
        return Statement(
            grade, line.index, line.index, below.index, f"{unwrapped(body)} {below.body.strip()}", line.when
        )
    titled = below is not None and below.body.strip() and _compiled("titled").search(body)
    speaker = below if below is not None and titled and not _compiled("head").search(below.body) else line
    return Statement(grade, speaker.index, line.index, speaker.index, unwrapped(speaker.body.strip()), line.when)


def _grade_line(body: str, line: _Line, *, went_on: bool) -> Grade | None:
    """`went_on`: the line's writer reports normal progress in the next one, as after an exception that it only printed."""
    named = _compiled("named").search(body)
    own = named or (line.severity == "E" and not line.continued) or _compiled("own").search(body)
    if _compiled("noted").match(body):
        return Grade.WARNED
    if not own and (not _compiled("faint").search(body) or _compiled("calm").search(body)):
        return None
    residue = unwrapped(body)
    if _compiled("follows").search(residue) and not (own and _compiled("killed").search(body)):
        return Grade.ENDED if _compiled("ended").search(residue) else Grade.FOLLOWS
    left_out = _compiled("left out").search(residue)
    if left_out and line.severity != "E":
        return Grade.ENDED if _compiled("checked").search(residue) else Grade.FOLLOWS
    if own and _compiled("bare").search(residue):
        return Grade.BARE
    if line.severity == "W" or _compiled("warning").search(body):
        return Grade.WARNED
    if not own:
        return None if line.severity else Grade.FAINT
    if line.severity == "I" and not named:
        return Grade.FAINT
    printed = left_out or (went_on and not line.severity and _compiled("exception").match(body))
    passed_on = printed or _compiled("passed on").search(body) or (line.shouted and not named)
    return Grade.PASSED_ON if passed_on else Grade.OWN


def unwrapped(text: str) -> str:
    """The innermost words of a line: without the wrappers of loggers and other processes, and without its location."""
    wrapper = _compiled("wrapper")
    while (match := wrapper.match(text)) and match.end():
        text = text[match.end() :].lstrip()
    text = _compiled("place").sub("", text).strip()
    return text.removesuffix('"') if text.count('"') % 2 else text
