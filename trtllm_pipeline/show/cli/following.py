"""Follows a text file that others write."""

from __future__ import annotations

import codecs
import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Final

from trtllm_pipeline.base import reading

_POLL_S: Final = 0.2


def follow(path: Path, goes_on: Callable[[], bool]) -> Iterator[str]:
    """The text of a file, and further text while `goes_on()` is true.

    Meanwhile the file may be moved or recreated. It need not exist at first.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    file: FileIO | None = None
    try:
        while True:
            # Checked before reading, so that everything written before the end is read.
            going = goes_on()
            data = b"" if file is None else file.read()
            with suppress(FileNotFoundError):
                status = path.stat()
                if file is None or status.st_ino != os.fstat(file.fileno()).st_ino:
                    before, file = file, FileIO(reading.open_fd(path))
                    if before is not None:
                        before.close()
                elif status.st_size < file.tell():
                    file.seek(0)
                data += file.read()
            if text := decoder.decode(data):
                yield text
            if not going:
                return
            time.sleep(_POLL_S)
    finally:
        if file is not None:
            file.close()
