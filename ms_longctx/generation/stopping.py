# SPDX-License-Identifier: Apache-2.0
"""Where a text ends: stop strings, wherever the borders between tokens fall."""

from __future__ import annotations

from collections.abc import Sequence

from ms_longctx.errors import MsLongctxError


class StopStrings:
    """Cuts a text that arrives in pieces before the first stop string.

    The result does not depend on how the text is cut into pieces: the stop string that is complete first
    counts (of several that end together the longest), and what follows it is dropped. A piece of text that
    may yet become a stop string is held back until that is decided.

    Args:
        stops: strings that end the text; they are not part of it.

    Raises:
        MsLongctxError: an empty stop string.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if isinstance(stops, str):
            stops = [stops]
        if any(not stop for stop in stops):
            raise MsLongctxError("stop: an empty string would end every text at once; remove it")
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False

    def push(self, piece: str) -> str:
        """Add ``piece`` and return the text that is now certain; sets :attr:`stopped` at a stop string."""
        if self.stopped:
            return ""
        text = self._held + piece
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.stopped = True
            self._held = ""
            return text[: min(found)[1]]
        keep = self._undecided(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """The text held back, when nothing more will come."""
        held, self._held = self._held, ""
        return held

    def _undecided(self, text: str) -> int:
        """Length of the longest end of ``text`` that a stop string begins with."""
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        for size in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-size:]) for stop in self._stops):
                return size
        return 0
