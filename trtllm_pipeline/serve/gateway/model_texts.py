"""Text processing for a model, from its directory: tokenizer, chat template, default sampling and limits."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
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
_DEFAULTS: Final = ("temperature", "top_p", "top_k", "repetition_penalty")


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
            return len(self.tokenizer.encode(text, add_special_tokens=special).ids)
        # encode_batch releases the GIL, encode does not.
        encode = partial(self.tokenizer.encode_batch, [text], add_special_tokens=special)
        (encoded,) = await asyncio.get_running_loop().run_in_executor(self._threads, encode)
        return len(encoded.ids)

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
