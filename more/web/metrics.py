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
        self.ends = self.count("vllm:request_success", "requests that ended", "finished_reason")
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
        # tokens that the cache holds; where no smaller number is set, B whole slots
        capacity = state["capacity"] or state["max_batch_size"] * state["max_length"]
        count, gauge = CounterMetricFamily, GaugeMetricFamily
        for family, name, what, value in (
            (count, "vllm:num_preemptions", "preemptions", state["preemptions"]),
            (count, "nano_sarathi:schedule_seconds", "policy's time, s", state["policy_seconds"]),
            (gauge, "vllm:num_requests_running", "requests that run", state["running"]),
            (gauge, "vllm:num_requests_waiting", "requests that wait", state["waiting"]),
            (gauge, "vllm:kv_cache_usage_perc", "KV cache in use", state["held"] / capacity),
        ):
            found = family(name, what, labels=["model_name"])
            found.add_metric([self.model], value)
            yield found
        steps = count("nano_sarathi:iterations", "by kind", labels=["model_name", "kind"])
        for kind, number in state["kinds"].items():
            steps.add_metric([self.model, kind], number)
        yield steps
        info = InfoMetricFamily("nano_sarathi:schedule", "what schedules now")
        told = ("policy", "chunk_size", "max_batch_size", "max_length", "priced")
        info.add_metric([], {"model_name": self.model} | {key: str(state[key]) for key in told})
        yield info

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
