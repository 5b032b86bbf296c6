"""Text processing for a model, from its directory: tokenizer, chat template, default sampling and limits."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Final

from trtllm_pipeline.base import FailureClass
from trtllm_pipeline.measure import chat_templates as chat
from trtllm_pipeline.models import Engine, EngineError, Fields, added_prefix, read_tokenizer
from trtllm_pipeline.serve.gateway.api_error import ApiError, bad

_SHORT: Final = 2_000
"""Characters that are tokenized faster than a thread starts."""
_LIMITS: Final = chat.RenderLimits(time_s=2.0)
_EXPANSION: Final = {"NFC": 3}
"""Maximum growth of a text by a normalizer, in bytes. Source: Unicode, "Normalization FAQ"; it is unknown for others.
"""
_DEFAULTS: Final = ("temperature", "top_p", "top_k", "repetition_penalty")


class PromptTokens:
    """Number of tokens of a prompt: known, or counted on demand or by a thread in the background."""

    __slots__ = ("_counted",)

    def __init__(self, counted: int | Callable[[], int] | asyncio.Future[int] | None) -> None:
        self._counted = counted

    @property
    def number(self) -> int | None:
        """None if the model's tokenizer is unknown, and for a response that ended before it was counted."""
        counted = self._counted
        if isinstance(counted, asyncio.Future):
            return counted.result() if counted.done() and not counted.cancelled() else None
        if callable(counted):
            self._counted = counted = counted()
        return counted

    def when_counted(self, then: Callable[[], None]) -> bool:
        """True if the result is available. Otherwise call `then` when it is."""
        if isinstance(self._counted, asyncio.Future) and not self._counted.done():
            self._counted.add_done_callback(lambda _future: then())
            return False
        return True

    def cancel(self) -> None:
        if isinstance(self._counted, asyncio.Future):
            self._counted.cancel()


class ModelTexts:
    """Counts tokens and renders conversations, off the event loop if that takes long."""

    def __init__(self, folder: Path, renderers: int) -> None:
        """Read `folder`. Raises DownloadError for files that cannot be read."""
        self.tokenizer = read_tokenizer(folder)
        self.template = chat.read(folder)
        self.config = Fields.read_optional(folder, "config.json").values
        generation = Fields.read_optional(folder, "generation_config.json")
        self.defaults: dict[str, float] = {
            name: generation.number(name, above=-1) for name in _DEFAULTS if generation.has(name)
        }
        """Sampling defaults recommended by the model's authors."""
        if generation.values.get("do_sample") is False:
            self.defaults = {"temperature": 0.0}
        named = Fields.read_optional(folder, "tokenizer_config.json").token("eos_token")
        ends = generation.token_ids("eos_token_id")
        tokens = (self.tokenizer.id_to_token(end) for end in ends)
        self.more_ends = tuple(token for token in tokens if token is not None and token != named)
        """Tokens that end a response in addition to the tokenizer's own, which is the only one known to TensorRT-LLM.
        """
        self.max_seq_len, self.max_input_len = _limits(folder)
        vocabulary: Mapping[str, int] = self.tokenizer.get_vocab()
        self._longest = max((len(token) for token in vocabulary), default=1)
        normalizer = self.tokenizer.normalizer
        self._expansion = 1 if normalizer is None else _EXPANSION.get(type(normalizer).__name__)
        self._added = self.tokenizer.num_special_tokens_to_add(is_pair=False) + 1  # and a space before the text
        self._anchor = self.tokenizer.encode(
            "a", add_special_tokens=False
        ).ids  # decoders strip the first space of a text
        self._double = added_prefix(self.tokenizer)
        """The first token that both the tokenizer and templates add."""
        self._threads = ThreadPoolExecutor(renderers, thread_name_prefix="gateway-texts")
        self._renderers: deque[chat.Renderer] = deque()
        if self.template is not None:
            self._renderers.extend(chat.Renderer(self.template, _LIMITS) for _ in range(renderers))
        self._free = asyncio.Semaphore(renderers)
        self._rendering: set[asyncio.Task[str]] = set()

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        for renderer in self._renderers:
            renderer.close()

    async def count(self, text: str, *, special: bool = True, most: int | None = None) -> int:
        """Number of tokens in a text, with `special` as a prompt. A result above `most` need not be exact."""
        if most is not None and len(text) > most * self._longest:
            return len(text) // self._longest
        if len(text) <= _SHORT:
            return self._short(text, special)
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._long, text, special)

    def count_meanwhile(self, text: str, *, special: bool) -> PromptTokens:
        """As `count`, for a result that can wait."""
        if len(text) <= _SHORT:
            return PromptTokens(partial(self._short, text, special))
        return PromptTokens(asyncio.get_running_loop().run_in_executor(self._threads, self._long, text, special))

    def has_at_most(self, text: str, most: float) -> bool:
        """True if a text has at least one token but at most `most`, however it is tokenized. False if unknown.

        A token is at least one byte of the normalized text.
        """
        if self._expansion is None or not text.strip():
            return False
        size = len(text) if text.isascii() else 4 * len(text)
        return self._expansion * size + self._added <= most

    def _short(self, text: str, special: bool) -> int:
        return len(self.tokenizer.encode(text, add_special_tokens=special).ids)

    def _long(self, text: str, special: bool) -> int:
        # encode_batch releases the GIL, encode does not.
        return len(self.tokenizer.encode_batch([text], add_special_tokens=special)[0].ids)

    async def render(self, conversation: chat.Chat, *, special: bool) -> str:
        """The prompt of a conversation. Raises ApiError.

        `special`: the server puts the tokenizer's special tokens before it, so they are left out here.
        """
        await self._free.acquire()
        task = asyncio.create_task(self._render(conversation))
        self._rendering.add(task)
        task.add_done_callback(self._rendering.discard)
        try:
            text = await asyncio.shield(task)  # if its client disconnects, the process still responds
        except chat.RefusedError as error:
            raise bad("messages", error.message) from None
        except chat.LimitError as error:
            raise bad("messages", f"{error.message}; shorten the conversation") from None
        except chat.TemplateError as error:
            status = 503 if error.failure is FailureClass.TRANSIENT else 500
            raise ApiError(status, error.message, code="chat_template_failed", reason="template") from None
        return text.removeprefix(self._double) if special and self._double else text

    async def _render(self, conversation: chat.Chat) -> str:
        renderer = self._renderers.popleft()
        try:
            return await renderer.render_on_loop(conversation)
        finally:
            self._renderers.append(renderer)
            self._free.release()

    async def warm(self) -> None:
        """Start the processes that render, so that the first request need not wait."""
        conversation = chat.Chat([{"role": "user", "content": ""}])
        renders = [self.render(conversation, special=False) for _ in self._renderers]
        await asyncio.gather(*renders, return_exceptions=True)  # each request gets its own error

    def answer_tokens(self, text: str) -> int:
        return len(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def token_text(self, token: int) -> str:
        """The text that a token adds to preceding text."""
        decode = partial(self.tokenizer.decode, skip_special_tokens=False)
        text: str = decode([*self._anchor, token])
        return text.removeprefix(decode(self._anchor))

    def pieces(self, text: str, count: int) -> list[str]:
        """`text` split into `count` tokens. If the tokenizer splits it differently, all of it is the first."""
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        if count > 1 and len(ids) == count:
            parts = [self.tokenizer.decode([each]) for each in ids]
            if "".join(parts) == text:
                return parts
        return [text, *[""] * (count - 1)]


def _limits(folder: Path) -> tuple[int | None, int | None]:
    """max_seq_len and max_input_len from an engine's directory. None if not specified."""
    try:
        engine = Engine.read(folder)
    except EngineError:
        return None, None
    longest = engine.max_seq_len
    if longest is None:
        longest = Fields.read_optional(folder, "config.json").optional_integer("max_position_embeddings")
    return longest, engine.max_input_len
