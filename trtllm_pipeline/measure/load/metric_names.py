"""Names of a level's metrics, for modules that do not need results."""

from typing import Final

from trtllm_pipeline.measure.load.stats import STATISTICS

RATES: Final = {"output_tps": "output_tokens_per_s", "input_tps": "input_tokens_per_s", "rps": "requests_per_s"}
"""Name of a rate in comparisons and objectives -> its field in a result."""
HIGHER_IS_BETTER: Final = frozenset((*RATES, "user_tps", "tokens_per_joule"))
"""Metrics of a level for which higher is better. For all others, lower is better."""
LATENCY_NAMES: Final = {
    "ttft_ms": "time to first token",
    "tpot_ms": "time per output token",
    "itl_ms": "inter-token latency",
    "icl_ms": "inter-chunk latency",
    "e2e_ms": "end-to-end latency",
}
LATENCIES: Final = tuple(LATENCY_NAMES)
LEVEL_METRICS: Final = (
    *(f"{name[:-3]}_{each}" for name in LATENCIES for each in STATISTICS),
    *RATES,
    "user_tps",
    "tokens_per_joule",
)
"""The metrics of a level as objectives and gates name them: `ttft_p99`, `output_tps`. `user_tps` is 1 / the median TPOT."""
