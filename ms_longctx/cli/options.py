# SPDX-License-Identifier: Apache-2.0
"""What verbs share: the parser, the configuration options and the ``--section.key value`` overrides."""

from __future__ import annotations

import argparse
import difflib
import json
from collections.abc import Sequence
from typing import Any, NoReturn

from ms_longctx.config import GenerationConfig, RunConfig, load_config, override_keys
from ms_longctx.errors import MsLongctxError

# Options with a short name of their own, and the key each of them sets.
_SHORTCUTS = {
    "data_path": "data.path",
    "device_target": "train.device_target",
    "resume": "train.resume",
    "output_dir": "train.output_dir",
}

# Options of the verbs that answer (generate, chat, evaluate) -> the keys that give their defaults.
ANSWER_KEYS = {
    "model": "model.pretrained",
    "tokenizer": "data.tokenizer",
    "chat_template": "data.chat_template",
    "dtype": "train.dtype",
    "device_target": "train.device_target",
    **{name: f"generation.{name}" for name in GenerationConfig.__dataclass_fields__},
}


class UsageError(MsLongctxError):
    """A command line that cannot be understood."""


class Parser(argparse.ArgumentParser):
    """ArgumentParser that takes no abbreviations, knows ``--debug`` everywhere and raises its errors."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, **settings)
        self.overrides: list[str] = []
        self._config_keys: dict[str, str] = {}
        self.add_argument(
            "--debug", action="store_true", default=argparse.SUPPRESS, help="show the traceback of an error"
        )

    def take_defaults_from_config(self, keys: dict[str, str]) -> None:
        """Add ``--config`` and overrides to a verb with options of its own, and let them give its defaults.

        Args:
            keys: option (without dashes) -> key of the configuration. What the command line leaves open takes
                the value of the key where the configuration states it; the option is not required then.
        """
        self.add_argument("--config", metavar="NAME_OR_FILE", help="its keys give options that are left out")
        self.set_defaults(overrides=[])
        self._config_keys = keys

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """As argparse does, after defaults came from a configuration where the verb reads one."""
        if self._config_keys:
            self._take_defaults(args)
        return super().parse_known_args(args, namespace)

    def _take_defaults(self, argv: Sequence[str]) -> None:
        finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
        finder.add_argument("--config", nargs="?")
        config = finder.parse_known_args(argv)[0].config
        run = load_config(config, self.overrides)
        for key, option in override_keys(self.overrides).items():
            if key not in self._config_keys.values():
                raise UsageError(f"command line: {option}: '{self.prog}' does not read this key")
        actions = {action.dest: action for action in self._actions}
        for name, key in self._config_keys.items():
            follows = key == "data.layout" and "train.objective" in run.given
            if key in run.given or follows:
                section, field = key.split(".")
                value = getattr(getattr(run, section), field)
                is_mapping = isinstance(value, dict)
                actions[name].default = [f"{k}={v}" for k, v in value.items()] if is_mapping else value
                actions[name].required = False

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}{self._suggestion(message)}; see '{self.prog} --help'")

    def _suggestion(self, message: str) -> str:
        """The nearest option or choice to the word that argparse complains about."""
        known = list(self._option_string_actions)
        for action in self._actions:
            known += [str(choice) for choice in action.choices or ()]
        words = [word.strip("'\",").partition("=")[0] for word in message.split()]
        if message.startswith("unrecognized arguments:"):
            candidates = words[2:3]
        else:
            candidates = words[words.index("choice:") + 1 :][:1] if "choice:" in words else []
        close = [match for word in candidates for match in difflib.get_close_matches(word, known, n=1)]
        return f"; did you mean '{close[0]}'?" if close else ""


def add_config_options(parser: argparse.ArgumentParser) -> None:
    """Give a verb the options that choose and change a run; read them with :func:`load_run`."""
    parser.add_argument("--config", metavar="NAME_OR_FILE", help="preset name or YAML file")
    parser.set_defaults(overrides=[])
    parser.epilog = "Any key of the configuration can be set with '--section.key value': --train.max_steps 100."
    parser.add_argument("--parallel_config", metavar="FILE", help='strategy file, e.g. {"dp": 1, "mp": 1}')
    parser.add_argument("--data_path", metavar="PATH", help="same as --data.path")
    parser.add_argument(
        "--device_target", metavar="NAME", help="auto, Ascend, GPU or CPU; same as --train.device_target"
    )
    parser.add_argument("--output_dir", metavar="DIR", help="same as --train.output_dir")


def add_resume_option(parser: argparse.ArgumentParser) -> None:
    """``--resume [DIR]``; alone it means the latest checkpoint of the output directory."""
    parser.add_argument(
        "--resume",
        nargs="?",
        const="latest",
        metavar="DIR",
        help="go on from checkpoint DIR, or from the latest one of the output directory",
    )


def load_run(args: argparse.Namespace) -> RunConfig:
    """The checked configuration that a verb's options ask for.

    Raises:
        ConfigError: see :func:`ms_longctx.config.load_config`.
    """
    overrides = list(args.overrides)
    for option, key in _SHORTCUTS.items():
        value = getattr(args, option, None)
        if value is not None:
            overrides.append(f"--{key}={value}")
    return load_config(args.config, overrides, args.parallel_config)


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """The model that answers, for verbs that need no configuration file."""
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model",
        required=True,
        metavar="PATH",
        help="Hugging Face directory, .gguf file, checkpoint or output directory of a training run",
    )
    group.add_argument(
        "--adapter", metavar="DIR", help="LoRA adapter in peft's format, or output directory of a LoRA run"
    )
    group.add_argument("--tokenizer", metavar="PATH", help="if it is not beside the model")
    group.add_argument("--chat_template", metavar="JINJA_OR_FILE", help="in place of the tokenizer's own")
    group.add_argument("--dtype", choices=("fp32", "fp16", "bf16"), default="fp32", help="default fp32")
    group.add_argument("--device_target", default="auto", metavar="NAME", help="auto, Ascend, GPU or CPU")


def add_key_option(parser: argparse.ArgumentParser) -> None:
    """``--key_file``, for verbs that also take a MindIR export as their model."""
    parser.add_argument("--key_file", metavar="FILE", help="AES key of an encrypted MindIR export")


def add_generation_options(parser: argparse.ArgumentParser) -> None:
    """One option for each key of the section ``generation``; read them with :func:`generation_settings`."""
    group = parser.add_argument_group("generation")
    defaults = GenerationConfig()
    for name in GenerationConfig.__dataclass_fields__:
        default = getattr(defaults, name)
        if name == "do_sample":
            group.add_argument("--do_sample", action="store_const", const="true", help="draw, not the likeliest")
        elif name == "stop":
            group.add_argument("--stop", nargs="+", metavar="TEXT", help="strings that end the answer")
        else:
            group.add_argument(f"--{name}", metavar="N", help=f"default {default}")


def generation_settings(args: argparse.Namespace) -> GenerationConfig:
    """The checked section ``generation`` that a verb's options give.

    Raises:
        ConfigError: a value of the wrong type or out of range.
    """
    names = GenerationConfig.__dataclass_fields__
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    values = {name: json.dumps(value) if name == "stop" else value for name, value in given.items()}
    return load_config(None, [f"--generation.{name}={value}" for name, value in values.items()]).generation


def split_overrides(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Part arguments into ``(ordinary, overrides)``; each override becomes one ``--section.key=value``.

    Raises:
        UsageError: an override has no value.
    """
    ordinary: list[str] = []
    overrides: list[str] = []
    remaining = iter(argv)
    for argument in remaining:
        name, equals, _ = argument.partition("=")
        if argument == "--":
            return [*ordinary, argument, *remaining], overrides
        if not name.startswith("--") or "." not in name:
            ordinary.append(argument)
            continue
        if not equals:
            value = next(remaining, None)
            if value is None or value.startswith("--"):
                raise UsageError(f"command line: {name}: a value is missing; expected '{name} VALUE'")
            argument = f"{name}={value}"
        overrides.append(argument)
    return ordinary, overrides
