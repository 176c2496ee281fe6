"""Prometheus metrics: vLLM's names under `corellm:`, so that its dashboards need little change.

What the engine counts is read from its latest snapshot when it is asked for. What only the server sees, such as
latencies, is counted here; with several API workers prometheus-client adds those up over all of them, through files in
the folder that `PROMETHEUS_MULTIPROC_DIR` names.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from corellm.comms.messages import Stats
from corellm.text_engine import Completion

CONTENT_TYPE = CONTENT_TYPE_LATEST
FOLDER_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"

_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 300, 1000)
_TOKEN_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 131072)


class Metrics:
    """One process's metrics. `stats` gives the engine's latest snapshot, once there is one."""

    def __init__(self, stats: Callable[[], Stats | None], model: Callable[[], str]) -> None:
        self._model = model
        own = CollectorRegistry()
        # What is asked for: this process's own figures, or those of all API workers together.
        self._registry = own
        if FOLDER_VARIABLE in os.environ:
            self._registry = CollectorRegistry()
            MultiProcessCollector(self._registry)  # type: ignore[no-untyped-call]
        self._registry.register(_EngineCollector(stats, model))
        label = ["model_name"]
        self._first = Histogram(
            "corellm:time_to_first_token_seconds",
            "From arrival to the first token",
            label,
            buckets=_SECONDS,
            registry=own,
        )
        self._between = Histogram(
            "corellm:request_time_per_output_token_seconds", "Mean time between the tokens of an answer", label,
            buckets=_TOKEN_SECONDS, registry=own,
        )  # fmt: skip
        self._whole = Histogram(
            "corellm:e2e_request_latency_seconds",
            "From arrival to the last token",
            label,
            buckets=_SECONDS,
            registry=own,
        )
        self._queued = Histogram(
            "corellm:request_queue_time_seconds",
            "From arrival to the first step",
            label,
            buckets=_SECONDS,
            registry=own,
        )
        self._prompt = Histogram(
            "corellm:request_prompt_tokens", "Prompt tokens of an answer", label, buckets=_TOKENS, registry=own
        )
        self._output = Histogram(
            "corellm:request_generation_tokens", "Output tokens of an answer", label, buckets=_TOKENS, registry=own
        )
        self._success = Counter(
            "corellm:request_success",
            "Answers that finished, by reason",
            ["model_name", "finished_reason"],
            registry=own,
        )
        self._http = Counter("corellm:http_requests", "HTTP responses", ["method", "handler", "status"], registry=own)

    def answered(self, completion: Completion) -> None:
        """Count one finished answer."""
        model = self._model()
        self._first.labels(model).observe(completion.first_token_s)
        self._whole.labels(model).observe(completion.total_s)
        self._queued.labels(model).observe(completion.queued_s)
        self._prompt.labels(model).observe(completion.prompt_tokens)
        self._output.labels(model).observe(completion.output_tokens)
        if completion.output_tokens > 1:
            decoding = completion.total_s - completion.first_token_s
            self._between.labels(model).observe(decoding / (completion.output_tokens - 1))
        self._success.labels(model, completion.finish_reason).inc()

    def responded(self, method: str, route: str, status: int) -> None:
        """Count one response; `route` is the pattern of its path, of which there are few."""
        self._http.labels(method, route, str(status)).inc()

    def render(self) -> bytes:
        """All of it, in Prometheus' text format."""
        return generate_latest(self._registry)


class _EngineCollector(Collector):
    """The engine's own figures, as of its latest snapshot."""

    def __init__(self, stats: Callable[[], Stats | None], model: Callable[[], str]) -> None:
        self._stats, self._model = stats, model

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        if stats is None:
            return
        gauges = {
            "num_requests_running": ("Sequences in the batch", stats.running),
            "num_requests_waiting": ("Sequences that wait", stats.waiting),
            "kv_cache_usage_perc": ("KV blocks in use; 1 is all of them", stats.kv.in_use / max(stats.kv.total, 1)),
            "kv_cache_blocks": ("KV blocks", stats.kv.total),
            "kv_cache_blocks_in_use": ("KV blocks in use", stats.kv.in_use),
        }
        counters = {
            "prompt_tokens": ("Prompt tokens computed, those from the cache not counted", stats.prompt_tokens),
            "generation_tokens": ("Tokens generated", stats.output_tokens),
            "prefix_cache_queries": ("Prompt tokens looked up in the prefix cache", stats.kv.query_tokens),
            "prefix_cache_hits": ("Prompt tokens found there", stats.kv.hit_tokens),
            "num_preemptions": ("Sequences preempted", stats.preemptions),
            "requests_aborted": ("Sequences aborted", stats.aborted),
            "requests_failed": ("Sequences failed", stats.failed),
        }
        for name, (text, value) in gauges.items():
            gauge = GaugeMetricFamily(f"corellm:{name}", text, labels=["model_name"])
            gauge.add_metric([self._model()], value)
            yield gauge
        for name, (text, count) in counters.items():
            counter = CounterMetricFamily(f"corellm:{name}", text, labels=["model_name"])
            counter.add_metric([self._model()], count)
            yield counter
