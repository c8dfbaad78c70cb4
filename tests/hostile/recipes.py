"""Public functions and classes, each in a short use of it with good arguments.

A recipe goes on to use what it made: an argument that is accepted must not fail later, in mid-run.
A new public function gets a recipe here.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from batch import Request
from beam.cost import cache_bytes, make_beams, simulate_beams
from beam.request import BeamSearchParams
from configs import GPUS, MODELS, ModelConfig
from configs.gpus import GPU, Link
from costmodel import (
    CostModel,
    Efficiency,
    make_batch,
    requests_that_fit,
    tokens_that_fit,
)
from engine import LLM, SamplingParams
from loading.checkpoint import load_config
from loading.device import choose_device, choose_dtype
from loading.files import find
from loading.load import choose_length
from loading.tokenizer import load_stop_ids, load_tokenizer
from pictures import gantt, perfetto
from pipeline import Rules, even_layers, make_micro_batches, simulate_pipeline
from pipeline.predictors import Classes, Constant, PromptLength, named
from scheduler import make_scheduler
from serving.capacity import Deployment, Load, capacity, token_budget
from serving.traffic import (
    Fixed,
    LogNormal,
    Uniform,
    Zipf,
    at_rate,
    gamma,
    make_requests,
    poisson,
    read_trace,
)
from simulate import make_cost_model, simulate
from tests.conftest import TINY

MODELS["small"] = replace(TINY["llama-gqa"], name="small")  # loads at once


@dataclass(frozen=True)
class Recipe:
    """A use of a function.

    good: arguments with which it works, as Python text. inner: it is called by programs rather than
    typed by users. So its arguments have the right types, and Python's own errors are right.
    """

    use: Callable
    good: Mapping[str, str]
    inner: bool

    @property
    def name(self) -> str:
        return self.use.__name__


def some_requests(count: int = 4) -> list[Request]:
    return [Request(i, range(20 + i), 5, arrival=0.1 * i) for i in range(count)]


def chosen(requests: object) -> object:
    """'some' stands for some requests."""
    return some_requests() if isinstance(requests, str) and requests == "some" else requests


def requests_of(prompt, max_tokens, stop_ids, arrival, request_id):
    request = Request(request_id, prompt, max_tokens, stop_ids, arrival)
    simulate([request, Request(7, range(9), 3)])


def small_llm(**options) -> LLM:
    return LLM("small", **({"max_batch_size": 3, "max_length": 40, "dtype": "float64"} | options))


def llm_of(**options):
    LLM(**options).generate([[1, 2, 3], [4]], SamplingParams(max_tokens=2))


def generate_with(prompts, sampling_params, arrival_times):
    small_llm().generate(prompts, sampling_params, arrival_times)


def sample_with(**options):
    small_llm().generate([[1, 2, 3]], SamplingParams(**options))


def stream_with(prompts, sampling_params):
    for _ in small_llm().stream(prompts, sampling_params):
        pass


def beams_with(prompts, cache, **options):
    small_llm().beam_search(prompts, BeamSearchParams(**options), cache=cache)


def resize_with(max_batch_size, max_length):
    llm = small_llm()
    llm.resize_cache(max_batch_size, max_length)
    llm.generate([[1, 2]], SamplingParams(max_tokens=2))


def changed_llm(policy, chunk_size, max_batch_size, cache_tokens):
    llm = small_llm()
    llm.policy, llm.chunk_size, llm.max_batch_size = policy, chunk_size, max_batch_size
    llm.cache_tokens = cache_tokens
    llm.generate([[1, 2, 3], [4]], SamplingParams(max_tokens=2))


def scheduler_of(policy, max_batch_size, chunk_size, cache_tokens):
    scheduler = make_scheduler(policy, max_batch_size, chunk_size, cache_tokens)
    scheduler.add(Request(0, [1, 2, 3], 2))
    scheduler.schedule(0.0)


def simulate_with(requests, **options):
    simulate(chosen(requests), **options)


def pipeline_with(requests, **options):
    requests = chosen(requests)
    simulate_pipeline(requests, "llama-13b", **options)


def rules_of(**options):
    rules = Rules(**options)
    simulate_pipeline(some_requests(), "llama-13b", stages=2, policy="td_pipe", rules=rules,
                      cache_tokens=60)  # fmt: skip


def micro_batches_of(**options):
    micro_batches = make_micro_batches(seconds_of=float, **options)
    for request in some_requests():
        micro_batches.add(request)
    micro_batches.next(0, 0.0)


def cost_of(model, gpu, tp, link, software):
    cost = make_cost_model(model, gpu, tp, link, software)
    cost.operators(make_batch([(0, 16, 32)], 2, 10))
    cost.seconds(make_batch([(0, 16, 32)], 2, 10))


def efficiency_of(compute, memory, attention, p, overhead):
    efficiency = Efficiency(compute, memory, attention, p, overhead)
    CostModel(MODELS["gpt2"], GPUS["a6000"], efficiency).seconds(make_batch([(0, 16, 32)], 2, 10))


def model_of(**options):
    CostModel(ModelConfig(**options), GPUS["a6000"]).seconds(make_batch([(0, 4, 8)], 1, 5))


def gpu_of(memory, peak, bandwidth):
    gpu = GPU("a6000", memory, peak, bandwidth)
    CostModel(MODELS["gpt2"], gpu).seconds(make_batch(decodes=1, context=5))
    requests_that_fit(MODELS["gpt2"], gpu, 100)


def link_of(bandwidth, latency, size, gpus, share):
    Link("mine", bandwidth, latency).all_reduce(size, gpus, share)


def batch_of(chunks, decodes, context):
    make_cost_model("gpt2", "a6000", 1, "pcie4", "sarathi").seconds(
        make_batch(chunks, decodes, context)
    )


def fitting(length, bytes_per_value, tp, utilization):
    requests_that_fit(MODELS["gpt2"], GPUS["a6000"], length, bytes_per_value)
    tokens_that_fit(MODELS["gpt2"], GPUS["a6000"], tp, utilization, bytes_per_value)


def rate_of(requests, rate):
    at_rate(chosen(requests), rate)


def lengths_of(tokens, low, high, exponent, by):
    for lengths in (Fixed(tokens), Uniform(low, high), Zipf(low, high, exponent, by)):
        make_requests([0.0, 0.1, 0.2], lengths, lengths)


def lognormal_of(median, p90, longest):
    make_requests([0.0, 0.1], LogNormal(median, p90, longest), Fixed(3))


def traffic_of(arrivals, seed, max_length):
    simulate(make_requests(arrivals, Fixed(20), Fixed(3), seed, max_length))


def trace_of(path, count):
    read_trace(path, count)


def capacity_of(slo, precision, start, factor):
    deployment = Deployment("mistral-7b")

    def load(rate: float) -> Load:
        return Load.of(deployment.serve(at_rate(some_requests(8), rate), "sarathi_serve", 512))

    capacity(load, slo, precision, start, factor)


def deployed(model, tp, gpu, stages, link, hop, policy, budget):
    deployment = Deployment(model, tp, gpu, stages, link, hop)
    deployment.serve(some_requests(), policy, budget)


def budget_of(slo, decodes, context, longest):
    cost = make_cost_model("mistral-7b", "a100-80gb", 1, "pcie4", "sarathi_serve")
    token_budget(cost, slo, decodes, context, longest)


def predicted_by(predict) -> None:
    """Lengths as TD-Pipe asks for them."""
    rules = Rules(predict=predict)
    simulate_pipeline(some_requests(), "llama-13b", stages=2, policy="td_pipe", rules=rules,
                      cache_tokens=60)  # fmt: skip


def predictors_of(text, tokens):
    predicted_by(named(text))
    predicted_by(Constant(tokens))


def classes_of(lengths, accuracy, seed):
    predicted_by(Classes(lengths, accuracy, seed))


def prompt_lengths_of(pairs, bins):
    predicted_by(PromptLength(pairs, bins))


def stages_of(n_layer, stages):
    even_layers(n_layer, stages)


def beam_costs(cache, count, beam_width, prompt, response, model, gpu):
    cache_bytes(MODELS["gptj-6b"], cache, count, beam_width, prompt, response)
    simulate_beams(make_beams(cache, count, beam_width, prompt, 0), model, gpu)


def pictures_of(path, bound, names):
    trace = simulate(some_requests())
    perfetto.save(path, {"mine": trace})
    gantt.draw(trace, bound=bound, names=names)


def files_of(model, directory):
    find(model)
    load_config(directory)
    load_stop_ids(directory, load_tokenizer(directory))


def machine_of(device, dtype, max_length):
    choose_dtype(dtype, choose_device(device))
    choose_length(MODELS["small"], max_length)


SIMULATED = {"policy": "'sarathi'", "chunk_size": "32", "max_batch_size": "3", "cache_tokens": "90",
             "tp": "1", "link": "'pcie4'", "software": "'sarathi'"}  # fmt: skip
INNER = (efficiency_of, gpu_of, link_of, batch_of, fitting, capacity_of, deployed, budget_of,
         classes_of,
         prompt_lengths_of, stages_of, beam_costs, pictures_of, files_of, machine_of,
         micro_batches_of,
         predictors_of)  # fmt: skip
RECIPES = tuple(
    Recipe(use, good, use in INNER)
    for use, good in (
        (requests_of, {"prompt": "[1, 2]", "max_tokens": "3", "stop_ids": "frozenset()",
                       "arrival": "0.5", "request_id": "1"}),
        (llm_of, {"model": "'small'", "policy": "'sarathi'", "chunk_size": "4",
                  "max_batch_size": "2", "cache_tokens": "30", "max_length": "30",
                  "dtype": "'float64'", "device": "'cpu'", "attention": "'sdpa'", "seed": "1",
                  "time_operators": "False", "check_weights": "False", "cuda_graphs": "'off'",
                  "fast": "True"}),
        (generate_with, {"prompts": "[[1, 2], [3]]", "sampling_params": "None",
                         "arrival_times": "[0.0, 0.01]"}),
        (sample_with, {"max_tokens": "3", "temperature": "0.8", "top_k": "5", "top_p": "0.9",
                       "seed": "1", "stop_ids": "(1, 2)", "ignore_eos": "False"}),
        (stream_with, {"prompts": "[[1, 2], [3]]", "sampling_params": "None"}),
        (beams_with, {"prompts": "[[1, 2], [3]]", "cache": "'segment'", "beam_width": "2",
                      "max_tokens": "3", "n": "1", "length_penalty": "1.0",
                      "early_stopping": "False", "stop_ids": "(1,)", "ignore_eos": "False",
                      "temperature": "0.0", "stop": "None"}),
        (resize_with, {"max_batch_size": "2", "max_length": "20"}),
        (changed_llm, {"policy": "'orca'", "chunk_size": "5", "max_batch_size": "2",
                       "cache_tokens": "30"}),
        (scheduler_of, {"policy": "'sarathi'", "max_batch_size": "3", "chunk_size": "4",
                        "cache_tokens": "30"}),
        (simulate_with, {"requests": "'some'", "model": "'llama-13b'", "gpu": "'a6000'",
                         **SIMULATED}),
        (pipeline_with, {"requests": "'some'", "gpu": "'a6000'", "stages": "2",
                         "micro_batches": "2", "memory": "'pool'", "hop": "'pcie4'",
                         "deal": "'queue'", "refill_every": "1", "rules": "None", "keep": "True",
                         **SIMULATED}),
        (rules_of, {"predict": "named('oracle')", "points": "'paper'", "between": "True",
                    "limit": "0.9", "stealing": "'window'", "whole_model": "False",
                    "peak_rows": "None", "pack": "64", "drain": "False", "occupied": "None",
                    "finished": "None"}),
        (micro_batches_of, {"policy": "'sarathi'", "count": "2", "stages": "2",
                            "max_batch_size": "2", "chunk_size": "16", "cache_tokens": "90",
                            "memory": "'split'", "deal": "'queue'", "refill_every": "1"}),
        (cost_of, {"model": "'gpt2'", "gpu": "'a6000'", "tp": "1", "link": "'pcie4'",
                   "software": "'sarathi'"}),
        (efficiency_of, {"compute": "0.7", "memory": "0.7", "attention": "0.5", "p": "2.0",
                         "overhead": "0.0"}),
        (model_of, {"name": "'mine'", "n_layer": "2", "n_head": "4", "hidden": "32",
                    "intermediate": "48", "vocab_size": "97", "max_length": "64",
                    "n_kv_head": "2", "head_dim": "8", "flavour": "'llama'",
                    "rope_scaling": "None", "window": "0"}),
        (gpu_of, {"memory": "48e9", "peak": "1e14", "bandwidth": "7e11"}),
        (link_of, {"bandwidth": "1e9", "latency": "1e-5", "size": "1e6", "gpus": "4",
                   "share": "0.8"}),
        (batch_of, {"chunks": "[(0, 4, 8)]", "decodes": "2", "context": "10"}),
        (fitting, {"length": "100", "bytes_per_value": "2", "tp": "1", "utilization": "0.9"}),
        (gamma, {"count": "3", "rate": "1.0", "cv": "2.0", "seed": "1"}),
        (poisson, {"count": "3", "rate": "1.0", "seed": "1"}),
        (rate_of, {"requests": "'some'", "rate": "2.0"}),
        (lengths_of, {"tokens": "5", "low": "2", "high": "9", "exponent": "1.1", "by": "'rank'"}),
        (lognormal_of, {"median": "10.0", "p90": "40.0", "longest": "100"}),
        (traffic_of, {"arrivals": "[0.0, 1.0]", "seed": "1", "max_length": "30"}),
        (trace_of, {"path": "'nothing.csv'", "count": "3"}),
        (capacity_of, {"slo": "0.03", "precision": "1.1", "start": "1.0", "factor": "2.0"}),
        (deployed, {"model": "'mistral-7b'", "tp": "1", "gpu": "'a100-80gb'", "stages": "1",
                    "link": "'pcie4'", "hop": "'pcie4'", "policy": "'sarathi'", "budget": "512"}),
        (budget_of, {"slo": "0.1", "decodes": "32", "context": "1000", "longest": "2000"}),
        (predictors_of, {"text": "'constant=5'", "tokens": "5"}),
        (classes_of, {"lengths": "[1, 5, 9, 20]", "accuracy": "0.8", "seed": "1"}),
        (prompt_lengths_of, {"pairs": "[(1, 5), (20, 9)]", "bins": "2"}),
        (stages_of, {"n_layer": "8", "stages": "2"}),
        (beam_costs, {"cache": "'segment'", "count": "2", "beam_width": "2", "prompt": "20",
                      "response": "5", "model": "'gptj-6b'", "gpu": "'a6000'"}),
        (pictures_of, {"path": "'out.json'", "bound": "0.1", "names": "{0: 'first'}"}),
        (files_of, {"model": "'demo'", "directory": "DEMO"}),
        (machine_of, {"device": "'cpu'", "dtype": "'float32'", "max_length": "20"}),
    )
)  # fmt: skip
