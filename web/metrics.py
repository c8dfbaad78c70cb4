"""What /metrics tells Prometheus. A name that begins with vllm: means the same in vLLM.

So a dashboard for vLLM can show this server. Our own names begin with nano_sarathi:.
"""

import time
from collections.abc import Callable, Iterator

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# s: upper bounds
FIRST = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100)
BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
WHOLE = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250)
ENDS = ("stop", "length", "abort", "error")
disable_created_metrics()  # when each series began: of no use here


class Metrics:
    """Counts requests and tokens of one server. state: `Runner.state`.

    The methods may be called from any thread. Times are measured in the server. For a client, a
    request begins earlier and ends later.
    """

    def __init__(self, model: str, state: Callable[[], dict]):
        self.model, self.state, self.registry = model, state, CollectorRegistry()
        self.http = Counter("nano_sarathi:http_requests", "answers, by path and HTTP status",
                            ["path", "status"], registry=self.registry)  # fmt: skip
        self.ends = self.count("vllm:request_success", "requests that ended", "finished_reason")
        self.refused = self.count("nano_sarathi:requests_refused", "refused requests", "reason")
        self.prompt = self.count("vllm:prompt_tokens", "tokens of prompts").labels(model)
        self.output = self.count("vllm:generation_tokens", "output tokens").labels(model)
        self.ttft = self.times("vllm:time_to_first_token_seconds", "TTFT in s", FIRST)
        self.tbt = self.times("vllm:inter_token_latency_seconds", "TBT in s", BETWEEN)
        self.latency = self.times("vllm:e2e_request_latency_seconds", "latency in s", WHOLE)
        for end in ENDS:  # a series that exists from the start can be compared with later
            self.ends.labels(model, end)
        self.registry.register(self)

    def count(self, name: str, what: str, *labels: str) -> Counter:
        return Counter(name, what, ["model_name", *labels], registry=self.registry)

    def times(self, name: str, what: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(name, what, ["model_name"], buckets=buckets, registry=self.registry)
        return histogram.labels(self.model)

    def collect(self) -> Iterator[Metric]:
        """The current values. We ask the runner for them only when Prometheus asks us."""
        state = self.state()
        steps = CounterMetricFamily(
            "nano_sarathi:iterations", "iterations, by kind", labels=["model_name", "kind"]
        )
        for kind, count in state["kinds"].items():
            steps.add_metric([self.model, kind], count)
        yield steps
        preempted = CounterMetricFamily(
            "vllm:num_preemptions", "preemptions", labels=["model_name"]
        )
        preempted.add_metric([self.model], state["preemptions"])
        yield preempted
        own = CounterMetricFamily(
            "nano_sarathi:schedule_seconds", "the policy's own time in s", labels=["model_name"]
        )
        own.add_metric([self.model], state["policy_seconds"])
        yield own
        held, capacity = state["held"], state["capacity"] or self.slots(state)
        for name, what, value in (
            ("vllm:num_requests_running", "requests that run", state["running"]),
            ("vllm:num_requests_waiting", "requests that wait", state["waiting"]),
            ("vllm:kv_cache_usage_perc", "share of the KV cache in use", held / capacity),
            (
                "nano_sarathi:longest_schedule_seconds",
                "the most for one iteration, in s",
                state["longest_schedule"],
            ),
        ):
            gauge = GaugeMetricFamily(name, what, labels=["model_name"])
            gauge.add_metric([self.model], value)
            yield gauge
        info = InfoMetricFamily("nano_sarathi:schedule", "what schedules now")
        told = ("policy", "chunk_size", "max_batch_size", "max_length", "priced")
        info.add_metric([], {"model_name": self.model} | {key: str(state[key]) for key in told})
        yield info

    @staticmethod
    def slots(state: dict) -> int:
        """Tokens that the cache holds where no smaller number is set: B whole slots."""
        return state["max_batch_size"] * state["max_length"]

    def text(self) -> bytes:
        return generate_latest(self.registry)


class Stopwatch:
    """The times of one request."""

    def __init__(self, metrics: Metrics):
        self.metrics, self.begin, self.last = metrics, time.perf_counter(), None

    def token(self) -> None:
        """Count a token that has come."""
        now, metrics = time.perf_counter(), self.metrics
        if self.last is None:
            metrics.ttft.observe(now - self.begin)
        else:
            metrics.tbt.observe(now - self.last)
        metrics.output.inc()
        self.last = now

    def end(self, reason: str) -> None:
        metrics = self.metrics
        metrics.ends.labels(metrics.model, reason).inc()
        if reason in ("stop", "length"):
            metrics.latency.observe(time.perf_counter() - self.begin)
