"""The flags of a script: those of the project's table (flags.py), with defaults of its own.

`start` begins a script: flags, the place for its results, its title. `lib/figure.py` ends it.
"""

import os
import re
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from command.checks import MOST, UserError
from command.flags import Parser
from experiments.lib import common
from experiments.lib.common import ROOT, make_directory
from loading.policyfile import load_policies
from scheduler import make_scheduler


@dataclass(frozen=True)
class Flag:
    """A flag of one script; its name is the key that it is given under.

    help: what it does here; "": as in the table. default: its value where it is not given; shown:
    that in words. quick: its default with --quick; None: the same. measure: it is refused without
    --measure. choices, type, several, repeated: as in `Parser.add_flag`.
    """

    help: str = ""
    default: object = None
    quick: object = None
    measure: bool = False
    shown: str = ""
    choices: Iterable[str] = ()
    type: Callable[[str], object] | None = None
    several: bool = False
    repeated: bool = False


MEASURE = {
    "device": Flag(default="auto", measure=True),
    "dtype": Flag(default="auto", measure=True),
    "model": Flag(default="laptop", measure=True),
    "cuda_graphs": Flag(default="auto", measure=True),
}  # of every figure that can be measured

# Of every script that compares policies: those of `policy` are compared, too.
POLICIES = {
    "policy": Flag(
        "a policy to compare, too", shown="all of --policy-file, where that is given",
        repeated=True,
    ),
    "policy_file": Flag(),
}  # fmt: skip

RESULTS, QUICK_RESULTS = ROOT / "results", ROOT / "build" / "quick"


def bare_parser(description: str, flags: Mapping[str, Flag] | None = None) -> Parser:
    """The flags of a script that writes no results; description: the script's docstring."""
    parser = Parser(description)
    flags, group = flags or {}, None
    if any(flag.measure for flag in flags.values()):
        parser.add_flag("measure")
        group = parser.add_argument_group("only with --measure")
    for name, flag in flags.items():
        default = flag.default
        shown = str(default).replace(f"{ROOT}{os.sep}", "")  # the same on every machine
        if default is None or isinstance(default, list | tuple):
            shown = " ".join(map(str, default or ()))
        parser.add_flag(
            name.replace("_", "-"),
            flag.help,
            shown=flag.shown or shown,
            choices=flag.choices,
            type=flag.type,
            several=flag.several,
            repeated=flag.repeated,
            group=group if flag.measure else None,
        )
    parser.add_flag("wide")
    return parser


def make_parser(description: str, flags: Mapping[str, Flag] | None = None) -> Parser:
    """The flags of a script that writes results: to --out."""
    parser = bare_parser(description, flags)
    if not parser.has("out"):
        parser.add_flag("out", shown="results/; build/quick/ with --quick")
    parser.add_flag("quick")
    if not parser.has("force"):
        parser.add_flag("force")
    return parser


def parse(
    parser: Parser, flags: Mapping[str, Flag], arguments: Sequence[str] | None = None
) -> Namespace:
    """The flags, with the defaults of those that are not given. arguments: None: the program's.

    Raises UserError where one is given that needs --measure, without it.
    """
    options = parser.parse_args(arguments)
    if getattr(options, "policy_file", None):
        names = load_policies(options.policy_file)
        options.policy = options.policy or names
    for name in getattr(options, "policy", None) or ():
        if name != "all":  # of serve_capacity.py
            make_scheduler(name, MOST, MOST)  # refuses an unknown name before any work
    common.set_wide(options.wide)
    if (
        "out" not in flags and getattr(options, "out", RESULTS) is None
    ):  # a smoke test must not replace results
        options.out = QUICK_RESULTS if options.quick else RESULTS
    for name, flag in flags.items():
        given = getattr(options, name)
        if given is None or given is False:  # a flag without a value
            quick = flag.quick is not None and options.quick
            setattr(options, name, flag.quick if quick else flag.default)
        elif flag.measure and not options.measure:
            raise UserError(
                f"--{name.replace('_', '-')} needs --measure: what is predicted are always the"
                " paper's models and GPUs"
            )
    return options


def file_name(name: str, options: Namespace) -> str:
    """Of a figure's files. With more policies it has files of their own, and the others stay."""
    policies = getattr(options, "policy", None) or ()
    return "-".join([name, *[re.sub(r"[^\w.]+", "-", each) for each in policies]])


def start(
    name: str,
    description: str,
    others: Sequence[str] | None = None,
    **flags: Flag,
) -> Namespace:
    """The flags of a script that writes NAME.csv and NAME.png, or `others`, to --out.

    All that is wrong with them is said before any work is done. Prints the script's title.
    """
    options = parse(make_parser(description, flags), flags)
    make_directory(options.out, file_name(name, options), others, options.force)
    print(description.splitlines()[0])
    return options
