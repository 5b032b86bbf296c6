"""The table of report formats and the commands that read it."""

from __future__ import annotations

import inspect
from typing import Any, get_args

import pytest

from trtllm_pipeline.show.cli import compare, report, run
from trtllm_pipeline.show.report.report_formats import AFTER_RUN, COMPARED, FORMATS, _function


@pytest.mark.parametrize("name", FORMATS)
def test_writers_of_every_format_can_be_imported(name: str) -> None:
    row = FORMATS[name]
    assert list(inspect.signature(_function(row.writer), eval_str=False).parameters) == ["report"]
    assert row.comparison is None or callable(_function(row.comparison))


@pytest.mark.parametrize(
    ("command", "names"), [(report.report, tuple(FORMATS)), (run.run, AFTER_RUN), (compare.compare, COMPARED)]
)
def test_commands_offer_the_formats_of_the_table(command: Any, names: tuple[str, ...]) -> None:
    choices, option = get_args(inspect.signature(command, eval_str=True).parameters["format"].annotation)
    assert get_args(choices) == names
    assert all(f"{name} ({FORMATS[name].help})" in option.help for name in names)
