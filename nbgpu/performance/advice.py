"""Advice on what to change in a run first, with an estimate of the time of a step after the change.

The estimate shortens the part of a step that the change acts on, and keeps all other parts. Over a known link
the exchange of gradients is simulated with the change.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from nbgpu.performance.bottlenecks import (
    Advice,
    Bound,
    Explanation,
    Observed,
    TimeBreakdown,
    break_down,
    in_ms,
)

_MAX_SHARE = 0.1
"""The largest share of the time that validations or checkpoints should take."""
_WORTH_CHANGING = 0.03
"""The smallest saved share of a step that makes other buckets worth a try."""
_MAX_WORKERS = 8
"""The largest number of data workers per rank. More take memory and cores from the ranks."""
_BUCKETS_MB = (1, 2, 5, 10, 25, 50, 100)


def explain(observed: Observed) -> Explanation:
    """Find what bounds a run and what to change first, and estimate the time of a step after each change.

    Args:
        observed: at least one step of each rank.
    """
    breakdown = break_down(observed)
    first = breakdown.change_first()
    advice = () if first is None else tuple(sorted(_Adviser(breakdown).advice(first), key=lambda a: a.step_s))
    return Explanation(
        breakdown.bound(), first, tuple(breakdown.sentences()), breakdown.step_s, breakdown.spent_s, advice
    )


class _Adviser:
    """Makes the advice for one cause from the breakdown of a mean step."""

    def __init__(self, breakdown: TimeBreakdown) -> None:
        self._breakdown = breakdown
        self._settings: Mapping[str, Any] = breakdown.observed.settings

    def advice(self, cause: Bound) -> Iterator[Advice]:
        """Yield the changes that act on a cause, with the shortest step time that they could achieve."""
        without_s = self._breakdown.step_s - self._breakdown.causes_s[cause]
        match cause:
            case "data":
                yield from self._on_data(without_s)
            case "communication":
                yield from self._on_communication()
            case "statistics":
                if self._settings.get("sync_batchnorm"):
                    text = (
                        "With statistics of each rank by itself, which are those of smaller batches "
                        "(sync_batchnorm=False)"
                    )
                    yield self._advice(text, {"sync_batchnorm": False}, without_s)
            case "imbalance":
                assert self._breakdown.lagging is not None, "imbalance has a rank"
                text = f"If rank {self._breakdown.lagging.rank} were as fast as the others"
                yield self._advice(text, {}, without_s)
            case "validation":
                yield from self._less_often("val_every", cause)
            case "checkpoints":
                yield from self._less_often("checkpoint_every", cause)
            case "cores":
                yield self._advice("If the ranks had these cores to themselves", {}, without_s)
            case "computation" | "other":
                pass

    def _on_data(self, without_s: float) -> Iterator[Advice]:
        """Yield the change that would let the ranks wait less for data: all volumes in memory or, where they
        are or cannot be, more workers.

        Args:
            without_s: the time of a step that never waits for data.
        """
        settings = self._settings
        # Settings that replace cached volumes allow no cache of all, and transforms on the GPU no workers.
        can_cache = settings.get("data") and not settings.get("replace_rate")
        if can_cache and settings.get("cache_rate") is not None and settings["cache_rate"] < 1:
            yield self._advice("With all data in memory (cache_rate=1)", {"cache_rate": 1.0}, without_s)
        elif settings.get("num_workers") is not None and settings.get("transforms_on") != "gpu":
            present = settings["num_workers"]
            busy_s = max(without_s, 1e-9)
            data_s = self._breakdown.causes_s["data"]
            # The time in which one worker reads a batch. Each of several workers reads its batch during as
            # many steps as there are workers; without one the rank reads, and waits for all of it.
            read_s = present * (data_s + busy_s) if present else data_s
            workers = min(_MAX_WORKERS, math.ceil(read_s / busy_s))
            if workers > present:
                text = f"With {workers} workers that read while the ranks compute (num_workers={workers})"
                yield self._advice(text, {"num_workers": workers}, max(without_s, read_s / workers))

    def _on_communication(self) -> Iterator[Advice]:
        """Yield the changes that shorten the exposed exchange of gradients: 16-bit gradients, other buckets,
        and fewer exchanges for the same number of samples."""
        settings = self._settings
        exposed_s = self._breakdown.causes_s["communication"]
        is_ddp = settings.get("strategy") == "ddp"
        if is_ddp and settings.get("comm_hook") == "none":
            yield self._advice(
                "With gradients of 16 bits on the way (comm_hook='fp16')",
                {"comm_hook": "fp16"},
                self._breakdown.step_s - exposed_s + self._exposed_in_16_bits_s(),
            )
        if is_ddp:
            yield from self._other_buckets()
        accumulate = settings.get("accumulate", 1)
        # With twice as many micro-batches, one exchange and one optimizer step serve the samples of two
        # present steps, so half of each is saved.
        halved_s = self._breakdown.step_s - (exposed_s + self._breakdown.parts["optimizer_s"]) / 2
        yield self._advice(
            f"With twice as many micro-batches in a step (accumulate={2 * accumulate})",
            {"accumulate": 2 * accumulate},
            halved_s,
        )

    def _exposed_in_16_bits_s(self) -> float:
        """Estimate the exposed time of the exchange for gradients with half the bytes: by the model of the
        link if the link is known, else by halving the whole exchange."""
        exposed_s = self._breakdown.causes_s["communication"]
        exchange = self._breakdown.observed.exchange
        if exchange is not None and (modelled_s := exchange.exposed_s()):
            return exposed_s * min(1.0, exchange.exposed_s(exchange.halved()) / modelled_s)
        # Except for latencies, half the bytes take half the time. The hidden part stays hidden.
        exchange_s = exposed_s + self._breakdown.parts.get("hidden_s", 0.0)
        return exposed_s - min(exposed_s, exchange_s / 2)

    def _other_buckets(self) -> Iterator[Advice]:
        """Yield the size of DDP's buckets with the least exposed exchange by the model of the link, if a step
        would become noticeably shorter."""
        exchange = self._breakdown.observed.exchange
        if exchange is None or not (modelled_s := exchange.exposed_s()):
            return
        now_mb = self._settings["bucket_mb"]
        # Correct the model by its error for the present buckets.
        factor = self._breakdown.causes_s["communication"] / modelled_s
        exposed_s = {
            mb: factor * exchange.exposed_s(exchange.regrouped(mb)) for mb in _BUCKETS_MB if mb != now_mb
        }
        least_s = min(exposed_s.values())
        # Among sizes within 2 % of the best, take the nearest to the present one: if all gradients fit into
        # one bucket, all larger sizes are equally good.
        best_sizes = [mb for mb, seconds in exposed_s.items() if seconds <= least_s * 1.02]
        best_mb = min(best_sizes, key=lambda mb: abs(mb - now_mb))
        without_s = self._breakdown.step_s - self._breakdown.causes_s["communication"] + exposed_s[best_mb]
        if without_s < (1 - _WORTH_CHANGING) * self._breakdown.step_s:
            num_now, num_then = len(exchange.buckets), len(exchange.regrouped(best_mb))
            count = "one bucket" if num_then == 1 else f"{num_then} buckets"
            text = f"With {count} in place of {num_now} (bucket_mb={best_mb})"
            yield self._advice(text, {"bucket_mb": float(best_mb)}, without_s)

    def _less_often(self, name: str, cause: Bound) -> Iterator[Advice]:
        """Yield a larger interval between validations or checkpoints: the present interval, doubled until
        they take at most a tenth of the time.

        Args:
            name: the setting, 'val_every' or 'checkpoint_every'.
            cause: 'validation' or 'checkpoints'.
        """
        every = self._settings.get(name) or 0
        if not every:
            return
        step_s, seconds = self._breakdown.step_s, self._breakdown.causes_s[cause]
        factor = 1
        while seconds / factor > _MAX_SHARE * (step_s - seconds + seconds / factor):
            factor *= 2
        changed_s = step_s - seconds + seconds / factor
        yield self._advice(
            f"With {name}={every * factor} in place of {every}", {name: every * factor}, changed_s
        )

    def _advice(self, condition: str, settings: Mapping[str, Any], step_s: float) -> Advice:
        """Build advice with a sentence on the time of a step and the samples per second after the change.

        Args:
            condition: the change, as the beginning of the sentence.
            settings: the settings to change, by name.
            step_s: the estimated time of a step.
        """
        now_s, samples = self._breakdown.step_s, self._breakdown.observed.samples_per_step
        return Advice(
            f"{condition}, a step would at best take {in_ms(step_s)} in place of {in_ms(now_s)}, which is "
            f"{samples / step_s:.4g} samples per second in place of {samples / now_s:.4g}.",
            settings,
            step_s,
            now_s / step_s,
        )
