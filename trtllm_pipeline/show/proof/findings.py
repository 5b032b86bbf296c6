"""What a deep examination found: one row for each cell, program and toolchain, as a table, as JSON, and in sentences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Final

from trtllm_pipeline.base import (
    Block,
    Cell,
    FailureClass,
    Grid,
    Heading,
    Items,
    Json,
    Machine,
    TextLine,
    layout_name,
    probe,
)
from trtllm_pipeline.orchestrate import CellResult, CellStatus, ForecastCheck
from trtllm_pipeline.show.proof.installed import InstalledComparison
from trtllm_pipeline.show.proof.reference_answers import Agreement, tolerance_nats
from trtllm_pipeline.tensorrt import EMBEDDED

SCHEMA: Final = 1
_ONE_GPU: Final = "tp1pp1"


class FindingStatus(str, Enum):
    """Whether what is known is true here."""

    VERIFIED = "verified"
    """It was done here, and came out as known."""
    DIFFERS = "differs"
    """It failed, or came out otherwise: here the package is wrong, or something is broken."""
    CANNOT = "cannot"
    """It was not tried, or not to the end: the reason says why."""


_STYLES: Final = {
    FindingStatus.VERIFIED: "green",
    FindingStatus.DIFFERS: "red",
    FindingStatus.CANNOT: "dim",
}
_NO_TIME: Final = "left for the next time: the same command does it then, --precision all now"
_ENDED_BY_THE_USER: Final = frozenset((FailureClass.USER.value, FailureClass.TIMEOUT.value))
"""Failures that say nothing of the toolchain: no space, a limit."""


@dataclass(frozen=True, slots=True)
class DeepFinding:
    """One thing that was looked at."""

    kind: str
    """cell, program, templates or toolchain."""
    name: str
    """Of a cell its id."""
    status: FindingStatus
    detail: str
    """What was found, or why nothing was."""
    hint: str | None = None
    log: str | None = None
    """Log of the stage that failed, or the answers that differ, below the workspace."""
    toolchain: str | None = None
    """Of a cell, as the next three."""
    family: str | None = None
    precision: str | None = None
    layout: str | None = None
    """Over GPUs, as `tp2pp1`."""
    agreement: Agreement | None = None
    """With the float reference, of a cell that answered."""
    tolerance_nats: float | None = None
    comparison: InstalledComparison | None = None
    """Of a program, and of templates."""

    def to_json(self) -> dict[str, Json]:
        """A row of the JSON file, see docs/formats.md."""
        return {**asdict(self), "status": self.status.value}


@dataclass(frozen=True, slots=True)
class DeepExamination:
    """All that `pipeline doctor --deep` found."""

    machine: Machine
    findings: tuple[DeepFinding, ...]
    interrupted: bool = False
    forecast: ForecastCheck | None = None
    """What the stage runs were expected to take and took; None where none ran."""

    def count(self, status: FindingStatus) -> int:
        """How many rows have it."""
        return Counter(each.status for each in self.findings)[status]

    @property
    def exit_code(self) -> int:
        """0 nothing differs, 1 something does, 3 nothing could be verified, 130 interrupted."""
        if self.interrupted:
            return 130
        if self.count(FindingStatus.DIFFERS):
            return 1
        return 0 if self.count(FindingStatus.VERIFIED) else 3

    def where(self, toolchain: str | None = None) -> str:
        """Release and GPU; what stands for them with the embedded toolchain, and on a machine without them."""
        found, gpus = self.machine.tensorrt_llm, sorted({gpu.name for gpu in self.machine.gpus})
        if found is None or toolchain == EMBEDDED:
            return f"the embedded toolchain on {self.machine.cpu}"
        return f"TensorRT-LLM {found.release} on {' and '.join(gpus) or self.machine.cpu}"

    def sentences(self) -> tuple[str, ...]:
        """What documentation may say was verified, for this release and hardware. Nothing else follows from it."""
        return tuple(self._sentences())

    def _sentences(self) -> Iterator[str]:
        good = [each for each in self.findings if each.status is FindingStatus.VERIFIED]
        for toolchain in dict.fromkeys(each.toolchain for each in good if each.kind == "cell"):
            of_it = [each for each in good if each.toolchain == toolchain]
            for family, layout in dict.fromkeys((each.family, each.layout) for each in of_it):
                precisions = ", ".join(
                    str(each.precision) for each in of_it if (each.family, each.layout) == (family, layout)
                )
                over = "" if layout == _ONE_GPU else f" over {layout}"
                yield (
                    f"{self.where(toolchain)}: a tiny {family} model that {toolchain} makes and serves{over} answers as the "
                    f"float reference within tolerance, in {precisions}"
                )
        programs = [each.name for each in good if each.kind == "program"]
        if programs:
            yield f"{self.where()}: the options that {', '.join(programs)} print are those that are recorded"
        if any(each.kind == "templates" for each in good):
            yield f"{self.where()}: the placeholders of the Triton templates are those that are recorded"

    def to_json(self) -> dict[str, Json]:
        """In the shape that docs/formats.md has."""
        found, gpus = self.machine.tensorrt_llm, self.machine.gpus
        return {
            "schema": SCHEMA,
            "tensorrt_llm": None if found is None else found.release,
            "gpus": [gpu.name for gpu in gpus],
            "identity": dict(probe.identity(self.machine)),
            "findings": [each.to_json() for each in self.findings],
            "counts": {status.value: self.count(status) for status in FindingStatus},
            "verified": list(self.sentences()),
            "interrupted": self.interrupted,
            "forecast": None if self.forecast is None else self.forecast.to_json(),
        }

    def blocks(self) -> Iterator[Block]:
        """All of it for people."""
        counts = ", ".join(f"{self.count(status)} {status.value}" for status in FindingStatus)
        yield Heading(f"{self.where()}: {counts}")
        yield Grid(
            ("what", "status", "found"),
            [(each.name, (each.status.value, _STYLES[each.status]), each.detail) for each in self.findings],
            left=(0, 1, 2),
        )
        hints = dict.fromkeys(f"{each.name}: {each.hint}" for each in self.findings if each.hint)
        yield Items("what to do", [TextLine(text) for text in hints])
        logs = [f"{each.name}: {each.log}" for each in self.findings if each.log]
        yield Items("logs and answers, below the workspace", [TextLine(text) for text in logs])
        yield Items("documentation may say", [TextLine(text) for text in self.sentences()])
        if self.forecast is not None:
            yield TextLine(self.forecast.line())


def of_cell(row: CellResult, agreement: Agreement | None, answers: str | None = None) -> DeepFinding:
    """The row of a cell; `agreement` is that of the file `answers` below the workspace, None where there are none."""
    toolchain, precision = str(row.axes["toolchain"]), str(row.axes["precision"])
    tolerance = tolerance_nats(toolchain, precision)
    status, detail = _judged(row, agreement, tolerance)
    return DeepFinding(
        "cell",
        str(row.id),
        status,
        detail,
        hint=row.hint if status is not FindingStatus.VERIFIED else None,
        log=row.log or answers if status is not FindingStatus.VERIFIED else None,
        toolchain=toolchain,
        precision=precision,
        family=_family(row.axes["model"]),
        layout=f"tp{row.axes['tp']}pp{row.axes['pp']}",
        agreement=agreement,
        tolerance_nats=tolerance if agreement else None,
    )


def of_left_out(cell: Cell) -> DeepFinding:
    """The row of a cell that there was no time for."""
    return DeepFinding(
        "cell",
        str(cell.id),
        FindingStatus.CANNOT,
        _NO_TIME,
        toolchain=cell.toolchain,
        precision=cell.precision,
        family=_family(cell.model),
        layout=layout_name(cell.tp, cell.pp),
    )


def _family(model: Json) -> str:
    """Of a directory that `material` wrote."""
    return str(model).removeprefix("./")


def _judged(row: CellResult, agreement: Agreement | None, tolerance: float) -> tuple[FindingStatus, str]:
    if row.status is CellStatus.INFEASIBLE:
        return FindingStatus.CANNOT, str(row.reason)
    if row.status is CellStatus.FAILED:
        status = FindingStatus.CANNOT if row.failure in _ENDED_BY_THE_USER else FindingStatus.DIFFERS
        return status, f"{row.failed_stage} failed: {row.reason}"
    if agreement is None:
        return FindingStatus.CANNOT, f"not finished: {row.status.value.replace('_', ' ')}"
    if agreement.unreadable:
        return FindingStatus.DIFFERS, (
            f"{len(agreement.unreadable)} of {agreement.questions} answers are not what this model can say, or not as long "
            "as asked for"
        )
    words = f"{agreement.favourites} of {agreement.tokens} tokens are the reference's, {agreement.loss_nats:.3f} nats lost a token"
    if agreement.loss_nats > tolerance:
        return FindingStatus.DIFFERS, f"{words}; expected at most {tolerance:g}"
    return FindingStatus.VERIFIED, words


def of_comparison(found: InstalledComparison) -> DeepFinding:
    """The row of a program or of the templates."""
    kind = "program" if found.name != "Triton templates" else "templates"
    if found.reason is not None:
        return DeepFinding(kind, found.name, FindingStatus.CANNOT, found.reason, comparison=found)
    status = FindingStatus.DIFFERS if found.differences else FindingStatus.VERIFIED
    what = "options" if kind == "program" else "placeholders"
    words = f"{found.known} {what} as recorded"
    return DeepFinding(
        kind,
        found.name,
        status,
        f"{words}; {found.differences}" if found.differences else words,
        hint="a new release is recorded as docs/architecture.md says" if found.differences else None,
        comparison=found,
    )


def of_toolchain(name: str, missing: str) -> DeepFinding:
    """The row of a toolchain that this machine cannot use."""
    return DeepFinding("toolchain", name, FindingStatus.CANNOT, missing)


def sorted_findings(findings: Sequence[DeepFinding]) -> tuple[DeepFinding, ...]:
    """What differs first, then what was verified, then what cannot; otherwise as they came."""
    order = [FindingStatus.DIFFERS, FindingStatus.VERIFIED, FindingStatus.CANNOT]
    return tuple(sorted(findings, key=lambda each: order.index(each.status)))
