"""Tokenize byte ranges of JSONL files in worker processes and hand the results back in order."""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import signal
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from _cli import UsageError


@dataclass(frozen=True)
class Chunk:
    """Whole lines of one file: `size` bytes from byte `start`."""

    path: Path
    start: int
    size: int


@dataclass(frozen=True)
class Tokenized:
    """One key of one chunk: int32 `tokens` of all documents, their `lengths`, and the `lines` read."""

    tokens: np.ndarray
    lengths: list[int]
    lines: int


@dataclass(frozen=True)
class LineError:
    """Why a line cannot be used; `line` counts from 1 within the chunk."""

    line: int
    message: str


def chunks_of(path: Path, chunk_bytes: int) -> Iterator[Chunk]:
    """Cut a file into runs of whole lines, each of about `chunk_bytes` bytes."""
    size = path.stat().st_size
    with path.open("rb") as stream:
        start = 0
        while start < size:
            stream.seek(min(start + chunk_bytes, size) - 1)
            stream.readline()  # to the end of the line that the cut falls into
            end = stream.tell()
            yield Chunk(path, start, end - start)
            start = end


def tokenize_chunk(
    tokenizer: Any, chunk: Chunk, keys: Sequence[str], append_eod: bool
) -> list[Tokenized] | LineError:
    """Tokenize each key of each line of `chunk`; the first unusable line ends it with a LineError."""
    with chunk.path.open("rb") as stream:
        stream.seek(chunk.start)
        lines = stream.read(chunk.size).split(b"\n")
    if lines and not lines[-1]:
        lines.pop()
    tokens: list[list[int]] = [[] for _ in keys]
    lengths: list[list[int]] = [[] for _ in keys]
    limit = tokenizer.vocab_size
    eod = [tokenizer.eod] if append_eod else []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line.decode("utf-8-sig"))
        except UnicodeDecodeError as error:
            return LineError(number, f"not UTF-8 ({error.reason}); convert the file first")
        except json.JSONDecodeError as error:
            return LineError(number, f"not JSON ({error.msg}); give one JSON object a line")
        if not isinstance(record, dict):
            return LineError(number, "not a JSON object; give one JSON object a line")
        for index, key in enumerate(keys):
            text = record.get(key)
            if not isinstance(text, str):
                has = ", ".join(sorted(record)) or "none"
                return LineError(
                    number, f"no text under the key '{key}'; name the right one with --json-keys (has: {has})"
                )
            try:
                ids = tokenizer.tokenize(text) if text else []
            except ValueError as error:  # NullTokenizer on words, or text that has no UTF-8 form
                return LineError(number, f"the tokenizer refuses the text ({error}); check --tokenizer-type")
            if ids and not 0 <= min(ids) <= max(ids) < limit:
                return LineError(
                    number, f"token ids {min(ids)}..{max(ids)} are outside 0..{limit - 1}; raise --vocab-size"
                )
            if ids:
                tokens[index] += ids
                tokens[index] += eod
            lengths[index].append(len(ids) + len(eod) if ids else 0)
    return [
        Tokenized(np.array(ids, dtype=np.int32), sizes, len(lines))
        for ids, sizes in zip(tokens, lengths, strict=True)
    ]


# Set in the parent before the workers are forked, so that each inherits the tokenizer without pickling it.
_inherited: tuple[Any, Sequence[str], bool] | None = None


def _start_worker() -> None:
    """Leave Ctrl-C to the parent, and end with the parent even if that is killed outright."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def _work(chunk: Chunk) -> list[Tokenized] | LineError:
    tokenizer, keys, append_eod = _inherited
    return tokenize_chunk(tokenizer, chunk, keys, append_eod)


def in_order(
    chunks: Sequence[Chunk], tokenizer: Any, keys: Sequence[str], append_eod: bool, workers: int
) -> Iterator[tuple[Chunk, list[Tokenized] | LineError]]:
    """Yield each chunk with its result, in the order of `chunks`; few results wait in memory at a time.

    Raises:
        UsageError: a worker process was killed.
    """
    if workers == 1 or len(chunks) <= 1:
        for chunk in chunks:
            yield chunk, tokenize_chunk(tokenizer, chunk, keys, append_eod)
        return
    global _inherited
    _inherited = (tokenizer, keys, append_eod)
    context = multiprocessing.get_context("fork")
    executor = ProcessPoolExecutor(min(workers, len(chunks)), mp_context=context, initializer=_start_worker)
    pending: deque[tuple[Chunk, Future]] = deque()
    try:
        for chunk in chunks:
            pending.append((chunk, executor.submit(_work, chunk)))
            if len(pending) >= 2 * workers:
                done, future = pending.popleft()
                yield done, future.result()
        while pending:
            done, future = pending.popleft()
            yield done, future.result()
    except BrokenProcessPool as error:
        raise UsageError(
            f"--workers {workers}: a worker process died, most likely for lack of memory; use fewer"
        ) from error
    finally:
        executor.shutdown(cancel_futures=True)
        _inherited = None
