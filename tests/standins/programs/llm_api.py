"""What the LLM API of a release says of `speculative_config`, for servers that read one. PyTorch only.

Source: `DecodingBaseConfig` and its subclasses in llm_args.py, read in trees around 1.0, 1.2 and 1.3. All of them forbid keys
that they do not know. The words of refusals are those that were read there, or begin with stand-in.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from tests.standins.programs import ProgramError, refusal

_OF_EVERY: Final = frozenset({"decoding_type", "max_draft_len", "speculative_model_dir"})
_OWN: Final = {
    "MTP": {"num_nextn_predict_layers", "use_relaxed_acceptance_for_thinking", "relaxed_topk", "relaxed_delta"},
    "Eagle": {"eagle_choices", "greedy_sampling", "eagle3_one_model", "num_eagle_layers"},
    "NGram": {"max_matching_ngram_size", "is_keep_all", "is_use_oldest", "is_public_pool"},
    "Medusa": {"medusa_choices", "num_medusa_heads"},
    "Lookahead": {"max_window_size", "max_ngram_size", "max_verification_set_size"},
    "DraftTarget": set(),
    "Draft_Target": set(),
}
_NOT_PYTORCH: Final = ("Medusa", "Lookahead")


def check_speculation(asked: Mapping[str, Any], model: Mapping[str, Any], release: str) -> int:
    """Tokens drafted at a time. Raises ProgramError for what the release's LLM API refuses."""
    kind = asked.get("decoding_type")
    renamed = tuple(map(int, release.split(".")[:2])) >= (1, 3)
    if kind not in _OWN or kind == ("DraftTarget" if renamed else "Draft_Target"):
        raise ProgramError(f"ValueError: Invalid decoding type: {kind}")
    if unknown := sorted(asked.keys() - _OF_EVERY - _OWN[kind]):
        raise ProgramError(f"pydantic_core.ValidationError: {unknown[0]}\n  Extra inputs are not permitted")
    if kind in _NOT_PYTORCH:
        raise refusal(f"{kind} is not for the PyTorch backend")
    length = asked.get("num_nextn_predict_layers", 1) if kind == "MTP" else asked.get("max_draft_len")
    if not isinstance(length, int) or length < 1:
        raise ProgramError(f"ValueError: max_draft_len must be > 0 for {kind}")
    drafter = asked.get("speculative_model_dir")
    if kind == "Eagle" and drafter is None:
        raise ProgramError("ValueError: Draft model must be provided for EAGLE")
    if kind in {"DraftTarget", "Draft_Target"} and drafter is None:
        raise ProgramError("ValueError: speculative_model must be specified for DraftTarget")
    if drafter is not None and not (Path(drafter) / "config.json").is_file():
        raise ProgramError(f"OSError: {drafter} does not appear to have a file named config.json.")
    if kind == "MTP" and not model.get("num_nextn_predict_layers"):
        raise refusal("the model has no layers for MTP")
    return length


def read_settings(text: str) -> dict[str, Any]:
    """A YAML file of nested mappings with plain values, as the pipeline writes it; lists are left out."""
    root: dict[str, Any] = {}
    open_at: list[tuple[int, dict[str, Any]]] = [(-1, root)]
    for line in text.splitlines():
        key, colon, value = line.strip().partition(":")
        if not colon or key.startswith("- "):
            continue
        depth = len(line) - len(line.lstrip())
        while open_at[-1][0] >= depth:
            open_at.pop()
        if value.strip():
            open_at[-1][1][key] = _value(value.strip())
        else:
            inner: dict[str, Any] = {}
            open_at[-1][1][key] = inner
            open_at.append((depth, inner))
    return root


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text.strip("'\"")


class Iterations:
    """Statistics of iterations as `/metrics` tells them, each once. All but the last token of a draft are accepted."""

    def __init__(self, drafted: int) -> None:
        self.drafted = drafted
        self.told: list[dict[str, Any]] = []

    def answer(self, tokens: int) -> None:
        """Count an answer of so many tokens."""
        while tokens > 0:
            accepted = min(max(1, self.drafted - 1), tokens - 1)
            tokens -= accepted + 1
            stats = {"numDraftTokens": self.drafted, "numAcceptedTokens": accepted, "numRequestsWithDraftTokens": 1}
            self.told.append({"iter": len(self.told), "specDecodingStats": stats})

    def take(self) -> list[dict[str, Any]]:
        """Those that were not told yet."""
        told, self.told = self.told, []
        return told
