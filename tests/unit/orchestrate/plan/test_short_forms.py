"""Short forms for people."""

from trtllm_pipeline.show.phrases import MAX_REASONS, never_works


def test_cells_that_can_never_work_are_told_by_reason() -> None:
    alike = [(f"a/tp2/bs{size}", "tp2: one GPU") for size in range(1, 5)]
    own = ("a/fp8", "no such\n  file")
    assert never_works([alike[0], own, *alike[1:]], None) == [
        "5 cells can never work:",
        "  4 cells: tp2: one GPU",
        *(f"    a/tp2/bs{size}" for size in range(1, 5)),
        "  a/fp8: no such\n  file",
    ]
    short = never_works([*alike, own], "pipeline status")
    assert short[1:-2] == ["  4 cells: tp2: one GPU", *(f"    a/tp2/bs{size}" for size in (1, 2, 3)), "    and 1 more"]
    assert short[-1] == "  pipeline status lists all"
    assert never_works([own], "pipeline status") == ["1 cell can never work:", "  a/fp8: no such\n  file"]
    assert never_works([], "pipeline status") == []


def test_a_thousand_reasons_are_not_all_told() -> None:
    lines = never_works([(f"c{number}", f"needs {number} GiB") for number in range(1000)], "pipeline status")
    assert len(lines) == 1 + MAX_REASONS + 1
    assert lines[-1] == "  pipeline status lists all"
