# SPDX-License-Identifier: Apache-2.0
"""Entry point of ``ms-longctx``: finds the verb, runs it and turns errors into one line and an exit code."""

from __future__ import annotations

import importlib
import os
import pkgutil
import sys
import traceback
from collections.abc import Sequence
from types import ModuleType

import ms_longctx.cli
from ms_longctx import __version__
from ms_longctx.cli.options import Parser, UsageError, split_overrides
from ms_longctx.errors import MsLongctxError

EXIT_FAILURE = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130
_FRAMEWORK = {"main", "options"}


def main(argv: Sequence[str] | None = None, script: tuple[str, str] | None = None) -> int:
    """Run one command line and return its exit code.

    0 success, 1 unexpected failure, 2 bad input or configuration, 130 interrupted by Ctrl-C.

    Args:
        argv: arguments without the program's name; ``None`` takes the process's own.
        script: ``(file name, verb)`` of a script that stands for one verb.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments
    try:
        try:
            return _run(arguments, script)
        finally:
            sys.stdout.flush()  # here, where a reader that is gone is no surprise
    except MsLongctxError as error:
        return _report(str(error), EXIT_BAD_INPUT, debug)
    except KeyboardInterrupt:
        return _report("interrupted", EXIT_INTERRUPTED, debug)
    except BrokenPipeError:
        # The reader (head, less) is gone. Point stdout elsewhere so that the flush at exit stays quiet.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILURE
    except OSError as error:
        if error.filename is None:
            return _report(f"unexpected {type(error).__name__}: {error}", EXIT_FAILURE, debug)
        return _report(f"{error.filename}: {error.strerror}", EXIT_BAD_INPUT, debug)
    except Exception as error:
        hint = "" if debug else "; run again with --debug for the traceback"
        return _report(f"unexpected {type(error).__name__}: {error}{hint}", EXIT_FAILURE, debug)


def verbs() -> list[str]:
    """Names of the verbs that exist."""
    modules = pkgutil.iter_modules(ms_longctx.cli.__path__)
    return [module.name for module in modules if module.name not in _FRAMEWORK]


def _run(arguments: list[str], script: tuple[str, str] | None) -> int:
    ordinary, overrides = split_overrides(arguments)
    if script is not None:
        ordinary.insert(0, script[1])
    parser = Parser(
        prog="ms-longctx", description="Train, evaluate and serve long-context Llama models with MindSpore."
    )
    parser.add_argument("--version", action="version", version=f"ms-longctx {__version__}")
    subparsers = parser.add_subparsers(dest="verb", metavar="VERB", title="verbs")
    wanted = next((word for word in ordinary if not word.startswith("-")), None)
    known = verbs()
    # Only the verb that runs is imported; all of them are for --help and for suggestions.
    modules = {name: _module(name) for name in ([wanted] if wanted in known else known)}
    for module in modules.values():
        module.add_parser(subparsers)
    for subparser in subparsers.choices.values():
        subparser.overrides = overrides
    if script is not None:
        subparsers.choices[script[1]].prog = script[0]
    args, unknown = parser.parse_known_args(ordinary)
    if unknown:
        subparsers.choices.get(args.verb, parser).error(f"unrecognized arguments: {' '.join(unknown)}")
    if args.verb is None:
        parser.print_help()
        return EXIT_BAD_INPUT
    if overrides:
        if not hasattr(args, "overrides"):
            raise UsageError(f"the verb '{args.verb}' reads no configuration: {overrides[0]} has no use here")
        args.overrides = overrides
    return int(modules[args.verb].run(args))


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"ms_longctx.cli.{name}")


def _report(message: str, code: int, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
