# SPDX-License-Identifier: Apache-2.0
"""Several processes that convert chunks, and how they stop."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any

from ms_longctx.data.convert import Converted, Settings, convert
from ms_longctx.data.source import Chunk
from ms_longctx.errors import MsLongctxError


def convert_chunks(settings: Settings, chunks: Iterable[Chunk], workers: int) -> Iterator[tuple[int, Converted]]:
    """Yield (bytes of input, samples) of each chunk, in order.

    Args:
        settings: what the samples are to be.
        chunks: read only a little ahead of what is yielded.
        workers: processes; 1 works in this one.

    Raises:
        MsLongctxError: from :func:`ms_longctx.data.convert.convert`, or a process died.
    """
    if workers == 1:
        yield from ((chunk.file_bytes, convert(settings, chunk)) for chunk in chunks)
        return
    context = multiprocessing.get_context("spawn")  # MindSpore's and the tokenizer's threads do not survive a fork
    pool = ProcessPoolExecutor(workers, context, initializer=_start_worker)
    running: deque[tuple[int, Future[Converted]]] = deque()
    try:
        for chunk in chunks:
            running.append((chunk.file_bytes, pool.submit(convert, settings, chunk)))
            if len(running) >= 3 * workers:
                file_bytes, future = running.popleft()
                yield file_bytes, future.result()
        for file_bytes, future in running:
            yield file_bytes, future.result()
    except BrokenProcessPool as error:
        raise MsLongctxError(
            "a worker process died (out of memory, or killed); run the same command again, with fewer workers"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _start_worker() -> None:
    """Ctrl-C is the parent's to handle; a worker whose parent is gone ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


@contextmanager
def stop_requests() -> Iterator[threading.Event]:
    """The first Ctrl-C or SIGTERM sets an event that is looked at between chunks; a second acts at once."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def request(number: int, _: Any) -> None:
        stop.set()
        for each, handler in before.items():
            signal.signal(each, handler)

    for number in before:
        signal.signal(number, request)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
