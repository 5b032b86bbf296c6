"""What an engine was built for, as far as requests to it are concerned."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from trtllm_pipeline.errors import FailureClass, StageError
from trtllm_pipeline.files.model_files import Fields, ModelFileError


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Lengths in tokens; None where the engine's config.json names no limit."""

    max_input_len: int | None
    max_seq_len: int | None

    @classmethod
    def read(cls, engine: Path, max_seq_len: int | None = None) -> EngineLimits:
        """The limits under `build_config` of an engine folder's config.json, which TensorRT-LLM writes as well.

        Releases up to 0.10 write the output's length instead of the whole sequence's. A folder of weights names no
        limit; `max_seq_len` is what its server was told.
        """
        try:
            build = Fields.read(engine, "config.json").fields("build_config")
            max_input_len, longest = build.optional_integer("max_input_len"), build.optional_integer("max_seq_len")
            max_output_len = build.optional_integer("max_output_len")
        except ModelFileError as error:
            raise StageError(f"{engine} is not an engine folder: {error.short}", failure=error.failure) from error
        if longest is None and max_input_len is not None and max_output_len is not None:
            longest = max_input_len + max_output_len
        return cls(max_input_len, max_seq_len if longest is None else longest)

    def longest_prompt(self, output_tokens: int) -> int | None:
        """Tokens a prompt may have at most when its answer has `output_tokens`; None where no limit is known."""
        known = (self.max_input_len, self.max_seq_len - output_tokens if self.max_seq_len else None)
        return min((limit for limit in known if limit), default=None)

    def check(self, requests: Iterable[tuple[str, int, int]]) -> None:
        """Raise StageError if any (id, input tokens, output tokens) can not be served, naming the worst one."""
        too_long = [
            (over, id_, tokens, output, limit, name)
            for id_, tokens, output in requests
            for over, name, limit in (
                (tokens - self.max_input_len if self.max_input_len else 0, "max_input_len", self.max_input_len),
                (tokens + output - self.max_seq_len if self.max_seq_len else 0, "max_seq_len", self.max_seq_len),
            )
            if over > 0
        ]
        if too_long:
            _, id_, tokens, output, limit, name = max(too_long)
            raise StageError(
                f"{len({item[1] for item in too_long})} prompts do not fit the engine; the longest, {id_!r}, has "
                f"{tokens} tokens and asks for {output} more, and the engine's {name} is {limit}",
                failure=FailureClass.INFEASIBLE,
                hint="shorten the prompts, ask for fewer tokens, or build for longer lengths",
            )
