# SPDX-License-Identifier: Apache-2.0
"""The ``ms-longctx`` command: every module here except ``main`` and ``options`` is a verb.

A verb module offers ``add_parser(subparsers)`` and ``run(args) -> int``; ``run`` imports what is heavy.
"""
