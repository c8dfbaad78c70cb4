"""The model over several stages, priced and for real. Skip it until you know the loop.

This file imports the priced half, which needs no torch. The real half is `stages.py` and
`launch.py`.
"""

from more.pipeline.account import BUBBLES, IDLE, PipelineTrace, Step
from more.pipeline.costs import Hop, StageCosts, even_layers, seconds_of_rows
from more.pipeline.micro_batches import MicroBatches
from more.pipeline.phases import Rules
from more.pipeline.policies import make_micro_batches
from more.pipeline.simulate import run_pipeline, simulate_pipeline

__all__ = [
    "BUBBLES", "IDLE", "Hop", "MicroBatches", "PipelineTrace", "Rules", "StageCosts", "Step",
    "even_layers", "make_micro_batches", "run_pipeline", "seconds_of_rows", "simulate_pipeline",
]  # fmt: skip
