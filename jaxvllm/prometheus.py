"""The engine's metrics in Prometheus's text format, for /metrics. Needs prometheus-client (extra `server`).

body = render(engine.get_metrics(), model_name="smollm2")
Response(body, media_type=CONTENT_TYPE)
"""

from collections.abc import Iterable, Iterator

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from jaxvllm.metrics import HELP, Counter, Gauge, Histogram, Metric

CONTENT_TYPE = CONTENT_TYPE_LATEST
Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily


def render(metrics: Iterable[Metric], *, model_name: str, engine: str = "0") -> bytes:
    """Metrics as text, with those of the Python process behind them.

    Args:
      metrics: what Engine.get_metrics() or FrontEndStats.to_metrics() gave.
      model_name, engine: labels of every one of them, as in vLLM.
    """
    registry = CollectorRegistry()  # of this call: the library's global one would outlive the engine
    registry.register(_Collector(metrics, {"model_name": model_name, "engine": engine}))
    for collector in (ProcessCollector, PlatformCollector, GCCollector):
        collector(registry=registry)
    return generate_latest(registry)


class _Collector(Collector):
    def __init__(self, metrics: Iterable[Metric], labels: dict[str, str]) -> None:
        self._metrics = metrics
        self._labels = labels

    def collect(self) -> Iterator[Family]:
        families: dict[str, Family] = {}
        for metric in self._metrics:
            names, values = [*self._labels, *metric.labels], [*self._labels.values(), *metric.labels.values()]
            family = families.get(metric.name) or _FAMILIES[type(metric)](
                metric.name, HELP.get(metric.name, metric.name), labels=names
            )
            families[metric.name] = family
            if isinstance(metric, Histogram) and isinstance(family, HistogramMetricFamily):
                family.add_metric(values, list(metric.buckets.items()), metric.sum)
            elif isinstance(metric, Counter | Gauge) and not isinstance(family, HistogramMetricFamily):
                family.add_metric(values, metric.value)
        yield from families.values()


_FAMILIES: dict[type[Metric], type[Family]] = {
    Counter: CounterMetricFamily,
    Gauge: GaugeMetricFamily,
    Histogram: HistogramMetricFamily,
}
