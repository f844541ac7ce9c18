"""What is counted and measured: plain numbers in dicts, which `exposition.py` turns into Prometheus's text.

Owns the numbers, and the caps on label values, so that no caller can create a series for each name it invents; the
names of metrics are in `table.py`. The counters of prometheus_client take a lock for every increment, which costs more
than the rest of a request's bookkeeping; here one event loop owns the numbers, so there is no lock. Never measures
anything itself: the rest of the gateway reports what happened.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Final, TypeVar

from greenroom.base.names import public_name
from greenroom.telemetry import table
from greenroom.telemetry.history import ModelCounts, Totals
from greenroom.telemetry.table import Labels, MetricSpec

# A series costs memory here and in every Prometheus that scrapes us. Callers choose tenants, and may ask for any model.
MODELS_MAX: Final = 1_000
# Models that no configuration names get no more of them, so that callers cannot take those of the others.
ADHOC_MODELS_MAX: Final = 500
# Pairs of model and tenant, so at most as many tenants. A pair is four lines of about 130 bytes at every scrape.
TENANT_SERIES_MAX: Final = 10_000
# The same for tenants that the operator has not named: without keys, any caller may send any name in a header.
UNNAMED_SERIES_MAX: Final = 1_000
ROUTES_MAX: Final = 100
UNKNOWN_MODEL: Final = "unknown"
OTHER: Final = "other"

_Label = TypeVar("_Label")


class _RequestSeries:
    """The series that one kind of request adds to, found with a single lookup."""

    __slots__ = ("count", "first_byte", "seconds", "wait")

    def __init__(self, count: Count, seconds: Spread, wait: Spread, first_byte: Spread) -> None:
        self.count = count
        self.seconds = seconds
        self.wait = wait
        self.first_byte = first_byte


# Few enough to sort at each question, enough for a 95th percentile.
WAITS_MAX: Final = 512


class Metrics:
    """Counts what it is told. `is_known` says which model ids exist; all others share the label "unknown".

    `is_adhoc` says which of them no configuration names. `is_named` says which tenants the operator has named; the rest
    get labels of their own while there is room, then share the label "other". `with_aliases` also measures what has a
    name of the runner API alone.
    """

    def __init__(
        self,
        is_known: Callable[[str], bool] | None = None,
        is_named: Callable[[str], bool] | None = None,
        is_adhoc: Callable[[str], bool] = lambda _: False,
        *,
        with_aliases: bool = False,
    ) -> None:
        self._is_known = is_known
        self._is_adhoc = is_adhoc
        self._is_named = is_named
        self._requests, self._seconds = Counter(table.REQUESTS), Histogram(table.REQUEST_SECONDS)
        self._wait, self._first_byte = Histogram(table.WAIT_SECONDS), Histogram(table.FIRST_BYTE_SECONDS)
        self._wait_causes = Histogram(table.WAIT_CAUSE_SECONDS)
        # By tenant, which not everyone may see. The status is for the names of the runner API.
        self.tenant_requests, self.tenant_tokens = Counter(table.ALIAS_REQUESTS), Counter(table.TOKENS)
        # The time of an answer without its wait.
        self.answer_seconds = Histogram(table.ALIAS_SECONDS) if with_aliases else None
        self._audio, self._audio_factor = Histogram(table.AUDIO_SECONDS), Histogram(table.AUDIO_FACTOR)
        self._lookups, self._moves, self._move_seconds = (
            Counter(table.LOOKUPS),
            Counter(table.MOVES),
            Histogram(table.MOVE_SECONDS),
        )
        self._prefix_answers = Counter(table.PREFIX_ANSWERS)
        self._evictions, self._rejections = Counter(table.EVICTIONS), Counter(table.REJECTIONS)
        self._edge_refusals, self._lease_asks = Counter(table.EDGE_REFUSALS), Counter(table.LEASE_ASKS)
        self._woken, self._wake_rate = Counter(table.WAKE_BYTES), Histogram(table.WAKE_RATE)
        self._read, self._read_rate = Counter(table.PREPARE_BYTES), Histogram(table.PREPARE_RATE)
        self._starts, self._losses = Counter(table.WORKER_STARTS), Counter(table.WORKER_LOSSES)
        self._flushed, self._prefetched = Counter(table.FLUSHED_BYTES), Counter(table.PREFETCH_BYTES)
        # Exposed from the start as 0, so that the first loss is an increase.
        self._losses.at()
        # How long the last requests waited.
        self.waits_s: deque[float] = deque(maxlen=WAITS_MAX)
        self._models: set[str] = set()
        self._routes: set[str] = set()
        self._named_pairs: set[tuple[str, str]] = set()
        self._unnamed_pairs: set[tuple[str, str]] = set()
        # Shortcuts for the hot path, only for labels that were admitted: so they are bounded too.
        self._request_series: dict[tuple[str, str, int], _RequestSeries] = {}
        self._tenant_series: dict[tuple[str, str], tuple[Count, Count]] = {}
        self._token_series: dict[tuple[str, str], tuple[Count, Count, Count]] = {}
        self._lookup_series: dict[str, tuple[Count, Count]] = {}
        self._prefix_series: dict[str, tuple[Count, Count]] = {}

    def request_done(
        self,
        *,
        model: str,
        tenant: str,
        route: str,
        status: int,
        seconds: float,
        wait_s: float,
        not_there_s: float,
        first_byte_s: float | None,
    ) -> None:
        """One request has ended, however it ended. `route` is one of ours, never the path that was asked for.
        `not_there_s` is the part of its wait before its slot was ready.
        """
        series = self._request_series.get((model, route, status)) or self._request_series_of(model, route, status)
        series.count.value += 1
        series.seconds.add(seconds)
        series.wait.add(wait_s)
        self.waits_s.append(wait_s)
        if wait_s > 0:
            self._wait_parts(model, wait_s, min(not_there_s, wait_s))
        if first_byte_s is not None:
            series.first_byte.add(first_byte_s)
        counts = self._tenant_series.get((model, tenant)) or self._tenant_series_of(model, tenant)
        is_success = status < 400
        counts[is_success].value += 1
        if self.answer_seconds is not None and is_success:
            self.answer_seconds.at(self._model(model)).add(max(0.0, seconds - wait_s))

    def refused(self, model: str, tenant: str) -> None:
        """A request for this model was refused before it came to the scheduler; empty: before its model was read."""
        counts = self._tenant_series.get((model, tenant)) or self._tenant_series_of(model, tenant)
        counts[False].value += 1

    def _wait_parts(self, model: str, wait_s: float, not_there_s: float) -> None:
        """Only for requests that waited, and only the parts that are there."""
        label = self._model(model)
        if not_there_s > 0:
            self._wait_causes.at(label, "not_there").add(not_there_s)
        if wait_s > not_there_s:
            self._wait_causes.at(label, "full").add(wait_s - not_there_s)

    def tokens(self, model: str, tenant: str, prompt: int, completion: int, cached: int) -> None:
        """`cached` counts prompt tokens that the engine did not have to compute again."""
        series = self._token_series.get((model, tenant)) or self._token_series_of(model, tenant)
        series[0].value += prompt
        series[1].value += completion
        series[2].value += cached

    def audio(self, model: str, route: str, audio_s: float, seconds: float) -> None:
        """An answer for so much sound took so long, without the wait for its model."""
        label = self._model(model)
        self._audio.at(label, route).add(audio_s)
        if audio_s > 0:
            self._audio_factor.at(label, route).add(seconds / audio_s)

    def looked_up(self, model: str, hit: bool) -> None:
        """A request for this model was granted at once (a hit), or had to wait or was refused (a miss)."""
        series = self._lookup_series.get(model) or self._pair_of(self._lookups, model, self._lookup_series)
        series[hit].value += 1

    def prefix_looked_up(self, model: str, hit: bool) -> None:
        """An answer of this model reused a prefix of its prompt (a hit) or none (a miss)."""
        series = self._prefix_series.get(model) or self._pair_of(self._prefix_answers, model, self._prefix_series)
        series[hit].value += 1

    def prefix_hit_rates(self) -> dict[str, float]:
        """By model: the share of its answers that reused a prefix, of those of which that is known."""
        counts: dict[str, dict[str, int]] = {}
        series = self._prefix_answers.series
        # The keys are copied in one step: this may run in a thread beside the loop that adds series.
        for model, result in list(series):
            counts.setdefault(model, {})[result] = series[model, result].value
        sums = {model: sum(of.values()) for model, of in counts.items()}
        return {model: of.get("hit", 0) / sums[model] for model, of in counts.items() if sums[model]}

    def move_done(self, model: str, kind: str, outcome: str, seconds: float) -> None:
        """A move has ended. Its duration counts only if the outcome is "done"."""
        label = self._model(model)
        self._moves.at(label, kind, outcome).add()
        if outcome == "done":
            self._move_seconds.at(label, kind).add(seconds)

    def evicted(self, model: str, reason: str) -> None:
        self._evictions.at(self._model(model), reason).add()

    def rejected(self, model: str, code: str) -> None:
        """`code` is that of an error class: one of a fixed set."""
        self._rejections.at(self._model(model), code).add()

    def edge_refused(self, code: str) -> None:
        self._edge_refusals.at(code).add()

    def lease_asked(self, outcome: str) -> None:
        """A program asked for memory and was answered, or left: granted, denied or given_up."""
        self._lease_asks.at(outcome).add()

    # --- the green room ---------------------------------------------------------------------------------------------

    def woke(self, model: str, size_bytes: int, seconds: float) -> None:
        """These bytes of weights were copied to a device in this time."""
        _add_copy(self._woken, self._wake_rate, self._model(model), size_bytes, seconds)

    def prepared(self, model: str, size_bytes: int, seconds: float) -> None:
        """These bytes of weights were read from disk in this time."""
        _add_copy(self._read, self._read_rate, self._model(model), size_bytes, seconds)

    def worker_started(self, *, spare: bool) -> None:
        self._starts.at("spare" if spare else "needed").add()

    def worker_lost(self) -> None:
        self._losses.at().add()

    def flushed(self, model: str, size_bytes: int) -> None:
        self._flushed.at(self._model(model)).add(size_bytes)

    def prefetched(self, model: str, size_bytes: int) -> None:
        self._prefetched.at(self._model(model)).add(size_bytes)

    # --- read -------------------------------------------------------------------------------------------------------

    def counters(self) -> tuple[Counter, ...]:
        """All counters but those by tenant."""
        counted = (self._requests, self._lookups, self._prefix_answers, self._moves, self._evictions, self._rejections)
        green_room = (self._woken, self._read, self._starts, self._losses, self._flushed, self._prefetched)
        return (*counted, self._edge_refusals, self._lease_asks, *green_room)

    def histograms(self) -> tuple[Histogram, ...]:
        measured = (self._audio, self._audio_factor, self._seconds, self._wait, self._wait_causes, self._first_byte)
        return (*measured, self._move_seconds, self._wake_rate, self._read_rate)

    def model_counts(self) -> dict[str, ModelCounts]:
        """Counts since the start, by model."""
        found: defaultdict[str, ModelCounts] = defaultdict(ModelCounts)
        for (model, result), count in self._lookups.series.items():
            found[model].add(ModelCounts(hits=count.value) if result == "hit" else ModelCounts(misses=count.value))
        for (model, _), count in self._evictions.series.items():
            found[model].evictions += count.value
        for (model, kind, outcome), count in self._moves.series.items():
            found[model].loads += count.value if (kind, outcome) == ("load", "done") else 0
        for (model, kind), spread in self._move_seconds.series.items():
            found[model].load_s += spread.sum if kind == "load" else 0
        return found

    def totals(self) -> Totals:
        """What was counted since the start, of all models and tenants together."""
        statuses = [(labels[2], count.value) for labels, count in self._requests.series.items()]
        tokens = dict.fromkeys(("prompt", "completion", "cached"), 0)
        for labels, count in self.tenant_tokens.series.items():
            tokens[labels[2]] += count.value
        waits, moves = self._wait.series.values(), self._move_seconds.series.items()
        swaps = [spread for labels, spread in moves if labels[1] in ("load", "wake")]
        return Totals(
            requests=sum(count for _, count in statuses),
            errors=sum(count for status, count in statuses if status.startswith("5")),
            refused=sum(count for status, count in statuses if status.startswith("4")),
            prompt_tokens=tokens["prompt"],
            completion_tokens=tokens["completion"],
            cached_tokens=tokens["cached"],
            waits=sum(sum(spread.counts) for spread in waits),
            wait_s=sum(spread.sum for spread in waits),
            seconds=sum(spread.sum for spread in self._seconds.series.values()),
            swaps=sum(sum(spread.counts) for spread in swaps),
            swap_s=sum(spread.sum for spread in swaps),
            hits=sum(count.value for labels, count in self._lookups.series.items() if labels[1] == "hit"),
        )

    # --- caps on labels ---------------------------------------------------------------------------------------------

    def _model(self, model: str) -> str:
        model = public_name(model)
        if model in self._models:
            return model
        is_real = self._is_known is None or self._is_known(model)
        most = ADHOC_MODELS_MAX if self._is_adhoc(model) else MODELS_MAX
        return model if is_real and _admit(self._models, model, most) else UNKNOWN_MODEL

    def _pair(self, model: str, tenant: str) -> tuple[str, str]:
        pair = (self._model(model), tenant)
        # Requests without a tenant count as named.
        if not tenant or self._is_named is None or self._is_named(tenant):
            is_admitted = _admit(self._named_pairs, pair, TENANT_SERIES_MAX)
        else:
            is_admitted = _admit(self._unnamed_pairs, pair, UNNAMED_SERIES_MAX)
        return pair if is_admitted else (pair[0], OTHER)

    def _request_series_of(self, model: str, route: str, status: int) -> _RequestSeries:
        label = self._model(model)
        route_label = route if _admit(self._routes, route, ROUTES_MAX) else OTHER
        # An engine may answer with any number; only HTTP statuses get a series of their own.
        is_status = 100 <= status <= 599
        series = _RequestSeries(
            self._requests.at(label, route_label, str(status) if is_status else OTHER),
            self._seconds.at(label, route_label),
            self._wait.at(label),
            self._first_byte.at(label),
        )
        if label == model and route_label == route and is_status:
            self._request_series[(model, route, status)] = series
        return series

    def _tenant_series_of(self, model: str, tenant: str) -> tuple[Count, Count]:
        """Errors, then successes."""
        pair = self._pair(model, tenant)
        counts = (self.tenant_requests.at(*pair, "error"), self.tenant_requests.at(*pair, "success"))
        if pair == (model, tenant):
            self._tenant_series[pair] = counts
        return counts

    def _token_series_of(self, model: str, tenant: str) -> tuple[Count, Count, Count]:
        pair = self._pair(model, tenant)
        prompt, completion, cached = (self.tenant_tokens.at(*pair, kind) for kind in ("prompt", "completion", "cached"))
        if pair == (model, tenant):
            self._token_series[pair] = (prompt, completion, cached)
        return prompt, completion, cached

    def _pair_of(self, counter: Counter, model: str, shortcuts: dict[str, tuple[Count, Count]]) -> tuple[Count, Count]:
        """Misses, then hits: the pair is indexed by `hit`."""
        label = self._model(model)
        pair = (counter.at(label, "miss"), counter.at(label, "hit"))
        if label == model:
            shortcuts[model] = pair
        return pair


def _admit(values: set[_Label], value: _Label, most: int) -> bool:
    """True if this label gets a series of its own: it has one already, or there is room for one more."""
    if value in values:
        return True
    if len(values) >= most:
        return False
    values.add(value)
    return True


def _add_copy(total: Counter, rate: Histogram, label: str, size_bytes: int, seconds: float) -> None:
    total.at(label).add(size_bytes)
    # A copy of nothing, or in no time, has no rate.
    if size_bytes > 0 and seconds > 0:
        rate.at(label).add(size_bytes / seconds)


# --- series ---------------------------------------------------------------------------------------------------------


class Count:
    """One series of a counter."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0

    def add(self, amount: int = 1) -> None:
        self.value += amount


class Spread:
    """One series of a histogram: how many values fell into each bucket, and their sum."""

    __slots__ = ("_bounds", "_lowest", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._lowest = bounds[0]
        # The last bucket is everything above the highest bound.
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def add(self, value: float) -> None:
        # Most requests do not wait.
        self.counts[0 if value <= self._lowest else bisect_left(self._bounds, value)] += 1
        self.sum += value


class Counter:
    """All series of one counter, by label values."""

    __slots__ = ("series", "spec")

    def __init__(self, spec: MetricSpec) -> None:
        self.spec = spec
        self.series: dict[Labels, Count] = {}

    def at(self, *labels: str) -> Count:
        """The series with these labels; made when it is first asked for."""
        found = self.series.get(labels)
        if found is None:
            found = self.series[labels] = Count()
        return found


class Histogram:
    """All series of one histogram, by label values."""

    __slots__ = ("series", "spec")

    def __init__(self, spec: MetricSpec) -> None:
        self.spec = spec
        self.series: dict[Labels, Spread] = {}

    def at(self, *labels: str) -> Spread:
        """The series with these labels; made when it is first asked for."""
        found = self.series.get(labels)
        if found is None:
            found = self.series[labels] = Spread(self.spec.buckets)
        return found
