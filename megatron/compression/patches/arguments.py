"""Megatron's command line: further flags, and what is done once it is known to be valid."""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from typing import Any

from megatron.compression.patches.symbols import follow, replace

_after_validating: list[Callable[[Namespace], None]] = []
_adding: list[Callable[[ArgumentParser], ArgumentParser]] = []


def after_validating_arguments(*after: Callable[[Namespace], None]) -> None:
    """Call each ``after(args)`` behind ``validate_args``, in order; a function given again is called once.

    Why: it is the one place that every entrypoint's arguments come through, before the tokenizer and the
    configs are made from them. Not reached: ``--yaml-cfg``, which has a function of its own.
    """
    from megatron.training import arguments

    _after_validating.extend(one for one in after if one not in _after_validating)

    def run(result: Any, given: dict) -> None:
        for one in _after_validating:
            one(given["args"])

    follow(arguments, "validate_args", ("args",), run)


def with_extra_arguments(add: Callable[[ArgumentParser], ArgumentParser]) -> None:
    """Have every ``parse_args`` call ``add(parser)`` too, behind the entrypoint's own provider.

    ``add`` returns the parser. Why: an entrypoint that knows nothing of this project takes its flags as well.
    """
    from megatron.training import arguments

    if add not in _adding:
        _adding.append(add)

    def wrap(parse_args):
        def wrapper(extra_args_provider=None, *others, **named):
            def provider(parser):
                for one in (extra_args_provider, *_adding):
                    parser = one(parser) if one is not None else parser
                return parser

            return parse_args(provider, *others, **named)

        return wrapper

    replace(arguments, "parse_args", ("extra_args_provider",), wrap)
