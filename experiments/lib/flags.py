"""The flags that experiments share. A script adds its own, each a `Flag` of command/flags.py.

`start` begins a script: flags, the place for its results, its title. `study.finish` ends it.
"""

import re
from argparse import Namespace
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

import scheduler
from command.checks import MOST
from command.flags import Flag, Parser
from configs import GPUS, MODELS, gpu_named
from experiments.lib import common
from experiments.lib.common import ROOT
from experiments.lib.rows import make_directory
from more.loading.policyfile import load_policies

MEASURE = {
    "device": Flag(default="auto", measure=True),
    "dtype": Flag(default="auto", measure=True),
    "model": Flag(default="llama-0.2b", measure=True),
    "cuda_graphs": Flag(default="auto", measure=True),
}  # of every figure that can be measured

# Of every script that compares policies: those of --policy are added to the comparison.
POLICIES = {
    "policy": Flag(
        "a policy to compare, too",
        shown="all of --policy-file, also beside others",
        repeated=True,
    ),
    "policy_file": Flag(repeated=True),
}

RESULTS = ROOT / "results"
QUICK_RESULTS = ROOT / "build" / "quick"
# Of every script that writes results. A smoke test must not replace them.
WRITES = {
    "out": Flag(
        "",
        RESULTS,
        QUICK_RESULTS,
        shown="results/; build/quick/ with --quick",
    ),
    "quick": Flag("run a smaller case, into a folder quick/ of --out: a smoke test, not a result"),
    "force": Flag(),
}
# ... and a picture or a page.
DRAWS = WRITES | {"open": Flag("open it in a browser when it is written")}
SHOWN = (".png", ".gif", ".html")


def model_flag(default: str | None = None, shown: str = "") -> Flag:
    """Of what is priced, not run: `more.loading.priced.priced_model` reads it."""
    words = f"one of {', '.join(MODELS)}; or a folder with a config.json, or a hub id on this disk"
    return Flag(f"model: {words}", default, shown=shown)


def gpu_flag(shown: str) -> Flag:
    return Flag(f"GPU, one of {', '.join(GPUS)}", shown=shown, type=gpu_named)


# Of every script that prices a model on a GPU (lib/engines.py: `setups`).
PRICED = {"model": model_flag(shown="the paper's"), "gpu": gpu_flag("the paper's")}
# ... and a deployment (lib/papers.py: `deployments`).
DEPLOYED = PRICED | {"tp": Flag("", shown="the paper's"), "software": Flag(shown="vidur-2024")}
# ... and of those that serve requests over time on it (lib/papers.py: `Recorded`).
SERVED = {
    **POLICIES,
    "policy": replace(POLICIES["policy"], help="a policy to compare, too; all: every one"),
    "requests_file": Flag("requests of a file, instead of the paper's lengths: the first of them"),
    **DEPLOYED,
    "max_batch_size": Flag("", shown="the paper's; measured, 8"),
}


class ScriptParser(Parser):
    """The flags of a script, and --wide. The policies of --policy-file are there from then on."""

    def __init__(self, description: str, flags: Mapping[str, Flag] | None = None) -> None:
        super().__init__(description, {**(flags or {}), "wide": Flag()})

    def parse_args(
        self, args: Sequence[str] | None = None, namespace: Namespace | None = None
    ) -> Namespace:
        options = super().parse_args(args, namespace)
        if getattr(options, "policy_file", None):
            names = [name for path in options.policy_file for name in load_policies(path)]
            given = getattr(options, "policy", None) or []
            asked = {name.partition(":")[0] for name in given}  # my_policy:50 is my_policy
            new = [name for name in names if name not in asked]
            options.policy = [*dict.fromkeys([*given, *new])]
        given = getattr(options, "policy", None) or ()
        if "all" in given and hasattr(options, "requests_file"):  # the others draw only a few
            others = [name for name in given if name != "all"]
            given = options.policy = [*dict.fromkeys([*others, *scheduler.POLICIES])]
        for policy in given:
            scheduler.make_scheduler(policy, MOST, MOST)  # refuses an unknown name before any work
        out = getattr(options, "out", None)
        if out and getattr(options, "quick", False) and out.name != QUICK_RESULTS.name:
            options.out = out / QUICK_RESULTS.name  # no smoke test in the place of a result
        common.set_wide(options.wide)
        common.set_open(getattr(options, "open", False))
        return options


def file_name(name: str, options: Namespace) -> str:
    """Of a figure's files. With a seed, requests, policies, a model of yours, it has its own."""
    given = defaultdict(lambda: None, vars(options))
    own = [given["requests_file"].stem] if given["requests_file"] else []
    if "gpu" in given:  # one of PRICED
        # where it is measured, the model is the one that runs
        own += [None if given["measure"] else options.model, options.gpu]
    if "tp" in given:  # one of DEPLOYED
        sizes = {"tp": options.tp, "B": given["max_batch_size"]}
        own += [f"{size}{number}" for size, number in sizes.items() if number]
        own += [given["software"]]
    policies = given["policy"] or ()
    if {*policies} >= {*scheduler.POLICIES}:
        policies = ["all", *(name for name in policies if name not in scheduler.POLICIES)]
    own += [given["predicted_lengths"], *policies]
    own += [f"rate{rate:g}" for rate in given["rate"] or ()]
    own += [f"concurrency{clients}" for clients in given["concurrency"] or ()]
    own += [f"seed{given['seed']}"] if given["seed"] else []
    return "-".join([name, *map(word_of, filter(None, own))])


def word_of(text: str) -> str:
    """One word, since blanks and commas separate the words of a case."""
    return re.sub(r"[^\w.=-]+", "-", text)


def start(
    name: str, description: str, others: Sequence[str] | None = None, **flags: Flag
) -> Namespace:
    """The flags of a script that writes NAME.csv and NAME.png, or `others`, to --out.

    All that is wrong with them is said before any work is done. Prints the script's title.
    """
    draws = others is None or any(name.endswith(SHOWN) for name in others)
    options = ScriptParser(description, flags | (DRAWS if draws else WRITES)).parse_args()
    make_directory(options.out, file_name(name, options), others, options.force)
    print(description.splitlines()[0])
    return options
