"""What a link of the explorer's page may say: the fields of a state, their bounds, their names.

A state is a dict of the fields below, such as {"C": 512}. A field that is missing, or has a bad
value, gets its default. To understand schedules, you may skip this file: it checks
values, names them, and computes nothing. It needs the standard library alone.
"""

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields, replace

from command.checks import Range, UserError, did_you_mean, lookup, shown
from configs import GPUS, MODELS
from configs.constants import SOFTWARE
from scheduler import POLICIES, make_scheduler


@dataclass(frozen=True)
class State:
    """What is shown. The page's controls and its links have these names."""

    model: str = "llama-13b"
    gpu: str = "a6000"
    tp: int = 1  # GPUs that share the model
    software: str = "xformers-2023"
    left: str = "vllm_v0"
    right: str = "sarathi_serve"
    C: int = 256
    C_right: int = 0  # 0: C
    B: int = 6
    P: int = 160
    D: int = 48
    spread: int = 0
    n: int = 5
    rate: float = 0.0
    long: int = 3500
    seed: int = 0


@dataclass(frozen=True)
class Slider:
    """A number of a state. label, unit: words beside its slider."""

    label: str
    unit: str
    bounds: Range

    def stops(self) -> list[float]:
        """Where the slider stops: four values to each doubling."""
        steps = [2**power * quarters / 4 for power in range(-6, 15) for quarters in (4, 5, 6, 7)]
        values = {round(step) if self.bounds.whole else step for step in steps}
        values |= {self.bounds.least, self.bounds.most}
        return sorted(value for value in values if value in self.bounds)


SLIDERS = {
    "C": Slider("chunk size C", "tokens of a batch", Range(1, 8192)),
    "C_right": Slider("another C, right", "tokens; 0: the same", Range(0, 8192)),
    "B": Slider("batch size B", "requests at once", Range(1, 256)),
    "P": Slider("prompt P", "tokens", Range(1, 16384)),
    "D": Slider("decodes D", "of each request", Range(1, 2048)),
    "spread": Slider("spread of lengths", "± %", Range(0, 90)),
    "n": Slider("requests", "besides the long one", Range(1, 500)),
    "rate": Slider("arrival rate", "per second; 0: all at once", Range(0, 64, whole=False)),
    "long": Slider("one long prompt", "tokens; 0: none", Range(0, 131072)),
    "seed": Slider("seed", "of lengths and arrivals", Range(0, 99)),
}
RATIOS = Slider("P:D", "prompt tokens per decode", Range(0.25, 512, whole=False))  # keeps P + D
# The other fields: their labels, and what there is to choose.
CHOICES: dict[str, tuple[str, Callable[[], Iterable]]] = {
    "model": ("model", lambda: MODELS),
    "gpu": ("GPU", lambda: GPUS),
    "tp": ("GPUs (TP)", lambda: (1, 2, 4, 8)),
    "software": ("software", lambda: SOFTWARE),
    "left": ("policy, left", lambda: POLICIES),
    "right": ("policy, right", lambda: POLICIES),
}
# What stands beside a schedule: name, unit, and a factor from our unit.
NUMBERS = {
    "throughput": ("throughput", "tokens/s", 1),
    "ttft_median": ("TTFT, median", "s", 1),
    "ttft_p99": ("TTFT, P99", "s", 1),
    "tbt_p99": ("TBT, P99", "ms", 1000),
    "longest_stall": ("longest stall", "s", 1),
    "mean_batch": ("mean batch", "requests", 1),
    "seconds": ("all done after", "s", 1),
}
EXAMPLES: dict[str, dict] = {
    "One long prompt": {},
    "SARATHI, Fig 9": {
        "left": "request_level", "right": "sarathi", "B": 18, "P": 956, "D": 68, "n": 36, "long": 0,
    },
    "Requests over time": {
        "C": 512, "B": 16, "P": 700, "D": 40, "spread": 60, "n": 24, "rate": 2, "long": 0,
    },
    "A batch that ends together": {
        "left": "request_level", "right": "orca", "B": 4, "spread": 80, "n": 12, "long": 0,
    },
    "Hybrid batches, or chunks": {"left": "hybrid_only", "right": "chunked_only", "C": 512},
    "Chunks, but never beside decodes": {"left": "prefill_first", "C": 512},
    "Two chunk sizes": {"left": "sarathi_serve", "C": 128, "C_right": 1024},
}  # fmt: skip


def read_state(given: object) -> tuple[State, list[str]]:
    """The state that a link or the page gives, and a sentence for each value that was not used."""
    state = State()
    notes = []
    if not isinstance(given, dict):
        return state, [f"The state is {shown(given)}; it must be an object of fields."]
    for name, value in given.items():
        names = [field.name for field in fields(State)]
        if name not in names:
            near = did_you_mean(name, names)
            notes.append(f"The link has {shown(name)}: there is no such field{near}.")
            continue
        try:
            state = replace(state, **{name: read_value(name, value)})
        except UserError as error:
            notes.append(f"{error} ({getattr(state, name)} is used)")
    return state, notes


def read_value(name: str, value: object) -> str | int | float:
    """One value of a state, or a UserError."""
    if name in SLIDERS:
        allowed = SLIDERS[name].bounds
        number = allowed.read(value) if isinstance(value, str) else value
        allowed.check(name, value if number is None else number)
        return number if allowed.whole else float(number)
    label, choices = CHOICES[name]
    allowed = {str(choice): choice for choice in choices()}
    text = str(value) if type(value) is int else value
    if name in ("left", "right") and isinstance(text, str) and text not in allowed:
        make_scheduler(text, 1, 1)  # a policy with an option, such as dynamic:512,256
        return text
    return lookup(allowed, text, label)


def link_of(state: State) -> str:
    """The part of the link after #: what is not the default."""
    default = asdict(State())
    given = {name: value for name, value in asdict(state).items() if value != default[name]}
    return "&".join(
        f"{name}={value:g}" if type(value) is float else f"{name}={value}"
        for name, value in given.items()
    )


def page() -> dict:
    """All that the page's controls need: names, labels, ranges, defaults."""
    controls = [
        {"name": name, "label": label, "choices": [str(choice) for choice in choices()]}
        for name, (label, choices) in CHOICES.items()
    ]
    controls += [control(name, slider) for name, slider in SLIDERS.items()]
    return {
        "controls": controls,
        "ratio": control("ratio", RATIOS),
        "numbers": NUMBERS,
        "defaults": asdict(State()),
        "examples": [
            {"title": title, "link": link_of(replace(State(), **state))}
            for title, state in EXAMPLES.items()
        ],
    }


def control(name: str, slider: Slider) -> dict:
    bounds = slider.bounds
    return {
        "name": name,
        "label": slider.label,
        "unit": slider.unit,
        "least": bounds.least,
        "most": bounds.most,
        "whole": bounds.whole,
        "stops": slider.stops(),
    }
