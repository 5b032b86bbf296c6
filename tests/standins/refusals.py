"""What programs refuse or turn off after parsing, from `tests/data/tensorrt_llm/refusals.json`, which says how it is read.

Standard library only, where no releases are put in order: the programs import it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

RECORDED: Final = Path(__file__).resolve().parents[1] / "data" / "tensorrt_llm" / "refusals.json"
Facts = Mapping[str, Any]


@lru_cache(maxsize=1)
def recorded() -> dict[str, list[dict[str, Any]]]:
    """Every refusal, by program. Those of `none` are of what a release does not have."""
    programs: dict[str, list[dict[str, Any]]] = json.loads(RECORDED.read_text(encoding="utf-8"))["programs"]
    return programs


@lru_cache(maxsize=512)
def of(program: str, release: str) -> list[dict[str, Any]]:
    """Those of one program in a release."""
    return [row for row in recorded()[program] if holds(row, release)]


def holds(row: Mapping[str, Any], release: str) -> bool:
    """Whether a fact with `since` and `before` is one of a release."""
    from packaging.version import Version

    version = Version(release)

    def begun(since: str | None) -> bool:
        # Of a line, as 0.17, every build counts.
        return since is None or version >= Version(f"{since}.dev0" if since.count(".") == 1 else since)

    return begun(row["since"]) and not (row["before"] and begun(row["before"]))


def met(row: Mapping[str, Any], facts: Facts) -> bool:
    """Whether all that a refusal asks of the facts is true of them."""
    return all(_meets(facts.get(name), wanted, facts) for name, wanted in row["when"].items())


def _meets(value: Any, wanted: Any, facts: Facts) -> bool:
    if isinstance(wanted, dict):
        if "not" in wanted:
            return value not in wanted["not"]
        if value is None:
            return False
        if "above" in wanted:
            other = facts.get(wanted["above"])
            return other is not None and value > other
        return bool(value >= wanted.get("least", value) and value < wanted.get("below", value + 1))
    return value in wanted if isinstance(wanted, list) else value == wanted


def words(row: Mapping[str, Any], facts: Facts) -> str:
    """What is said."""
    text: str = row["words"]
    for name, value in facts.items():
        text = text.replace(f"{{{name}}}", str(value))
    return text


def applied(rows: Sequence[Mapping[str, Any]], facts: dict[str, Any]) -> Iterator[tuple[Mapping[str, Any], str]]:
    """Each refusal that is met, with its words, in their order; `facts` change as the program changes them."""
    for row in rows:
        if met(row, facts):
            said = words(row, facts)
            if isinstance(row["does"], dict):
                facts.update(row["does"])
            yield row, said


def attention_facts(plugins: Mapping[str, Any]) -> dict[str, bool | None]:
    """Switches of `trtllm-build` as facts."""
    names = ("context_fmha", "streamingllm", "use_paged_context_fmha", "use_fp8_context_fmha")
    return {name: None if plugins.get(name) is None else plugins[name] == "enable" for name in names}
