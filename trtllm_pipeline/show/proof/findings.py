"""Findings of a deep examination: one row per cell, program and toolchain, as a table, as JSON, and as sentences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Final

from trtllm_pipeline.base import Cell, FailureClass, Json, Machine, layout_name, probe, text_blocks
from trtllm_pipeline.orchestrate import CellResult, CellStatus, ForecastCheck
from trtllm_pipeline.show.proof.reference_answers import Agreement, tolerance_nats
from trtllm_pipeline.tensorrt import catalog, installed

_ONE_GPU: Final = "tp1pp1"


class FindingStatus(str, Enum):
    """Result of verifying this package's knowledge here."""

    VERIFIED = "verified"
    """It ran here with the expected result."""
    DIFFERS = "differs"
    """It failed or gave a different result: the package is wrong here, or something is broken."""
    CANNOT = "cannot"
    """It was not run, or not to the end. See the reason."""


_STYLES: Final = {FindingStatus.VERIFIED: "green", FindingStatus.DIFFERS: "red", FindingStatus.CANNOT: "dim"}
_COMPARED: Final = {installed.TEMPLATES: ("templates", "placeholders"), installed.LLM_API: ("arguments", "names")}
"""Comparisons other than programs -> kind, and their content."""
_NO_TIME: Final = "postponed to the next run of this command; use --precision all to run it now"
_ENDED_BY_THE_USER: Final = frozenset((FailureClass.USER.value, FailureClass.TIMEOUT.value))
"""Failures unrelated to the toolchain: disk space, a limit."""


@dataclass(frozen=True, slots=True)
class DeepFinding:
    """One finding."""

    kind: str
    """cell, program, templates, arguments or toolchain."""
    name: str
    """The id for a cell."""
    status: FindingStatus
    detail: str
    hint: str | None = None
    log: str | None = None
    """Log of the failed stage, or the differing answers, relative to the workspace."""
    toolchain: str | None = None
    """For cells, like the next three."""
    family: str | None = None
    precision: str | None = None
    layout: str | None = None
    """Parallelism over GPUs, e.g. `tp2pp1`."""
    agreement: Agreement | None = None
    """Agreement with the float reference, for cells with answers."""
    tolerance_nats: float | None = None
    comparison: installed.InstalledComparison | None = None
    """For programs, templates and arguments."""

    def to_json(self) -> dict[str, Json]:
        """A row of the JSON file, see docs/reference/formats.md."""
        return {**asdict(self), "status": self.status.value}


@dataclass(frozen=True, slots=True)
class DeepExamination:
    """All findings of `pipeline doctor --deep`."""

    machine: Machine
    findings: tuple[DeepFinding, ...]
    interrupted: bool = False
    forecast: ForecastCheck | None = None
    """Expected and actual time of the stage runs, or None if none ran."""

    def count(self, status: FindingStatus) -> int:
        return Counter(each.status for each in self.findings)[status]

    @property
    def exit_code(self) -> int:
        """0 for no differences, 1 for differences, 3 if nothing could be verified, 130 if interrupted."""
        if self.interrupted:
            return 130
        if self.count(FindingStatus.DIFFERS):
            return 1
        return 0 if self.count(FindingStatus.VERIFIED) else 3

    def where(self, toolchain: str | None = None) -> str:
        """Release and GPU, or their equivalent for the embedded toolchain or a machine without GPUs."""
        installation, gpus = self.machine.tensorrt_llm, sorted({gpu.name for gpu in self.machine.gpus})
        if installation is None or toolchain == catalog.EMBEDDED:
            return f"the embedded toolchain on {self.machine.cpu}"
        return f"TensorRT-LLM {installation.release} on {' and '.join(gpus) or self.machine.cpu}"

    def sentences(self) -> Iterator[str]:
        """Claims that documentation may make for this release and hardware. The results support no others."""
        good = [each for each in self.findings if each.status is FindingStatus.VERIFIED]
        for toolchain in dict.fromkeys(each.toolchain for each in good if each.kind == "cell"):
            of_it = [each for each in good if each.toolchain == toolchain]
            for family, layout in dict.fromkeys((each.family, each.layout) for each in of_it):
                precisions = ", ".join(
                    str(each.precision) for each in of_it if (each.family, each.layout) == (family, layout)
                )
                over = "" if layout == _ONE_GPU else f" over {layout}"
                yield (
                    f"{self.where(toolchain)}: a tiny {family} model built and served by {toolchain}{over} matches "
                    f"the float reference within tolerance, in {precisions}"
                )
        programs = [each.name for each in good if each.kind == "program"]
        if programs:
            yield f"{self.where()}: the options printed by {', '.join(programs)} match the recorded ones"
        if any(each.kind == "templates" for each in good):
            yield f"{self.where()}: the placeholders of the Triton templates match the recorded ones"
        if any(each.kind == "arguments" for each in good):
            yield f"{self.where()}: the arguments of the LLM API match the recorded ones"

    def to_json(self) -> dict[str, Json]:
        """The JSON form, see docs/reference/formats.md."""
        installation, gpus = self.machine.tensorrt_llm, self.machine.gpus
        return {
            "schema": 1,
            "tensorrt_llm": None if installation is None else installation.release,
            "gpus": [gpu.name for gpu in gpus],
            "identity": dict(probe.identity(self.machine)),
            "findings": [each.to_json() for each in self.findings],
            "counts": {status.value: self.count(status) for status in FindingStatus},
            "verified": list(self.sentences()),
            "interrupted": self.interrupted,
            "forecast": None if self.forecast is None else self.forecast.to_json(),
        }

    def blocks(self) -> Iterator[text_blocks.Block]:
        counts = ", ".join(f"{self.count(status)} {status.value}" for status in FindingStatus)
        yield text_blocks.Heading(f"{self.where()}: {counts}")
        yield text_blocks.Grid(
            ("what", "status", "found"),
            [(each.name, (each.status.value, _STYLES[each.status]), each.detail) for each in self.findings],
            left=(0, 1, 2),
        )
        hints = dict.fromkeys(f"{each.name}: {each.hint}" for each in self.findings if each.hint)
        yield text_blocks.Items("fixes", [text_blocks.TextLine(text) for text in hints])
        logs = [f"{each.name}: {each.log}" for each in self.findings if each.log]
        yield text_blocks.Items(
            "logs and answers, relative to the workspace", [text_blocks.TextLine(text) for text in logs]
        )
        yield text_blocks.Items("claims for documentation", [text_blocks.TextLine(text) for text in self.sentences()])
        if self.forecast is not None:
            yield text_blocks.TextLine(self.forecast.line())


def of_cell(row: CellResult, agreement: Agreement | None, answers: str | None = None) -> DeepFinding:
    """The row of a cell. `agreement` belongs to the file `answers`, relative to the workspace. None without answers."""
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
    """Family of a directory written by `material`."""
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
            f"{len(agreement.unreadable)} of {agreement.questions} answers contain text that this model cannot generate, or have the wrong "
            "length"
        )
    words = f"{agreement.favourites} of {agreement.tokens} tokens match the reference, {agreement.loss_nats:.3f} nats lost per token"
    if agreement.loss_nats > tolerance:
        return FindingStatus.DIFFERS, f"{words}; expected at most {tolerance:g}"
    return FindingStatus.VERIFIED, words


def of_comparison(comparison: installed.InstalledComparison) -> DeepFinding:
    kind, what = _COMPARED.get(comparison.name, ("program", "options"))
    if comparison.reason is not None:
        return DeepFinding(kind, comparison.name, FindingStatus.CANNOT, comparison.reason, comparison=comparison)
    status = FindingStatus.DIFFERS if comparison.differences else FindingStatus.VERIFIED
    words = f"{comparison.known} {what} as recorded"
    return DeepFinding(
        kind,
        comparison.name,
        status,
        f"{words}; {comparison.differences}" if comparison.differences else words,
        hint="record a new release as described in docs/architecture.md" if comparison.differences else None,
        comparison=comparison,
    )


def of_toolchain(name: str, missing: str) -> DeepFinding:
    return DeepFinding("toolchain", name, FindingStatus.CANNOT, missing)


def sorted_findings(findings: Sequence[DeepFinding]) -> tuple[DeepFinding, ...]:
    """Differences first, then verified rows, then the rest."""
    order = [FindingStatus.DIFFERS, FindingStatus.VERIFIED, FindingStatus.CANNOT]
    return tuple(sorted(findings, key=lambda each: order.index(each.status)))
