# SPDX-License-Identifier: Apache-2.0
"""Errors that are the user's to mend: one clear message each."""

from __future__ import annotations


class MsLongctxError(Exception):
    """Bad input, configuration or environment.

    The message names what is wrong, where (file, line or key), what was expected and what to do. The command
    line prints it as one line and exits with code 2; ``--debug`` shows the traceback.
    """
