"""What is counted, how it is shown, and that no caller can create series without end."""

from __future__ import annotations

import gc
import itertools
import re
import threading

import pytest
from prometheus_client.parser import text_string_to_metric_families

from greenroom.telemetry import metrics as caps
from greenroom.telemetry import table
from greenroom.telemetry.exposition import DeviceMemory, Gauges, GpuFigures, LeaseFigures, counter_family, render
from greenroom.telemetry.metrics import Counter, Metrics


def series_of(metrics: Metrics, gauges: Gauges | None = None) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Every sample, read back by the parser Prometheus clients use."""
    body, content_type = render(metrics, gauges or Gauges())
    assert content_type.startswith("text/plain")
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(body.decode())
        for sample in family.samples
    }


def value(metrics: Metrics, name: str, gauges: Gauges | None = None, **labels: str) -> float | None:
    return series_of(metrics, gauges).get((name, frozenset(labels.items())))


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


def answer(metrics: Metrics, **changed: object) -> None:
    said: dict[str, object] = {
        "model": "qwen",
        "tenant": "lab",
        "route": "chat",
        "status": 200,
        "seconds": 1.5,
        "wait_s": 0.2,
        "not_there_s": 0.0,
        "first_byte_s": 0.4,
    }
    metrics.request_done(**{**said, **changed})  # type: ignore[arg-type]


def test_request_is_counted_by_model_route_status_and_tenant(metrics: Metrics) -> None:
    answer(metrics)
    answer(metrics)
    answer(metrics, status=503)
    assert value(metrics, "greenroom_requests_total", model="qwen", route="chat", status="200") == 2
    assert value(metrics, "greenroom_requests_total", model="qwen", route="chat", status="503") == 1
    assert value(metrics, "greenroom_tenant_requests_total", model="qwen", tenant="lab") == 3


def test_times_fall_into_cumulative_buckets(metrics: Metrics) -> None:
    for seconds in (0.004, 0.005, 0.3, 10_000):
        answer(metrics, seconds=seconds)
    name = "greenroom_request_seconds"
    below = {
        le: value(metrics, f"{name}_bucket", model="qwen", route="chat", le=le)
        for le in ("0.005", "0.25", "0.5", "600.0", "+Inf")
    }
    assert below == {"0.005": 2, "0.25": 2, "0.5": 3, "600.0": 3, "+Inf": 4}
    assert value(metrics, f"{name}_count", model="qwen", route="chat") == 4
    assert value(metrics, f"{name}_sum", model="qwen", route="chat") == pytest.approx(10_000.309)


def test_answer_without_first_byte_is_not_measured_as_one(metrics: Metrics) -> None:
    answer(metrics, first_byte_s=None)
    assert value(metrics, "greenroom_first_byte_seconds_count", model="qwen") == 0
    assert value(metrics, "greenroom_queue_wait_seconds_count", model="qwen") == 1


def test_a_wait_is_split_by_its_causes(metrics: Metrics) -> None:
    answer(metrics, wait_s=5.0, not_there_s=4.0)
    answer(metrics, wait_s=3.0, not_there_s=9.0)
    answer(metrics, wait_s=2.0, not_there_s=0.0)
    answer(metrics, wait_s=0.0, not_there_s=0.0)
    name = "greenroom_queue_wait_cause_seconds"
    parts = {
        cause: (
            value(metrics, f"{name}_count", model="qwen", cause=cause),
            value(metrics, f"{name}_sum", model="qwen", cause=cause),
        )
        for cause in ("not_there", "full")
    }
    assert parts == {"not_there": (2, 7.0), "full": (2, 3.0)}
    assert value(metrics, "greenroom_queue_wait_seconds_sum", model="qwen") == 10.0


def test_tokens_lookups_moves_evictions_and_refusals_are_counted(metrics: Metrics) -> None:
    metrics.tokens("qwen", "lab", 10, 20, 5)
    metrics.tokens("qwen", "lab", 1, 2, 0)
    metrics.looked_up("qwen", True)
    metrics.looked_up("qwen", False)
    metrics.looked_up("qwen", False)
    metrics.move_done("qwen", "load", "done", 3.0)
    metrics.move_done("qwen", "load", "failed", 700.0)
    metrics.evicted("siglip2", "memory")
    metrics.rejected("qwen", "queue_full")
    metrics.edge_refused("bad_framing")
    metrics.lease_asked("granted")
    assert value(metrics, "greenroom_tokens_total", model="qwen", tenant="lab", kind="completion") == 22
    assert value(metrics, "greenroom_tokens_total", model="qwen", tenant="lab", kind="cached") == 5
    assert value(metrics, "greenroom_model_lookups_total", model="qwen", result="hit") == 1
    assert value(metrics, "greenroom_model_lookups_total", model="qwen", result="miss") == 2
    assert value(metrics, "greenroom_moves_total", model="qwen", kind="load", outcome="failed") == 1
    assert value(metrics, "greenroom_move_seconds_count", model="qwen", kind="load") == 1
    assert value(metrics, "greenroom_evictions_total", model="siglip2", reason="memory") == 1
    assert value(metrics, "greenroom_rejections_total", model="qwen", code="queue_full") == 1
    assert value(metrics, "greenroom_edge_refusals_total", code="bad_framing") == 1
    assert value(metrics, "greenroom_lease_asks_total", outcome="granted") == 1


def test_gauges_show_this_scrape_and_forget_the_last(metrics: Metrics) -> None:
    before = Gauges(
        queue_depth={"qwen": 3},
        in_flight={"qwen": 2},
        slots={("qwen", "ready"): 1},
        memory_mib={("qwen", "gpu0"): 4096},
        devices={"gpu0": DeviceMemory(8192, 3000, 100)},
        leases=LeaseFigures(2, 3, {"gpu0": 700}),
        connections=7,
        uptime_s=12.5,
    )
    assert value(metrics, "greenroom_queue_depth", before, model="qwen") == 3
    assert value(metrics, "greenroom_in_flight", before, model="qwen") == 2
    assert value(metrics, "greenroom_slots", before, model="qwen", tier="ready") == 1
    assert value(metrics, "greenroom_model_memory_mib", before, model="qwen", device="gpu0") == 4096
    assert value(metrics, "greenroom_device_capacity_mib", before, device="gpu0") == 8192
    assert value(metrics, "greenroom_device_free_mib", before, device="gpu0") == 3000
    assert value(metrics, "greenroom_device_foreign_mib", before, device="gpu0") == 100
    assert value(metrics, "greenroom_leases", before) == 2
    assert value(metrics, "greenroom_leases_waiting", before) == 3
    assert value(metrics, "greenroom_lease_memory_mib", before, device="gpu0") == 700
    assert value(metrics, "greenroom_connections", before) == 7
    assert value(metrics, "greenroom_uptime_seconds", before) == 12.5
    after = series_of(metrics, Gauges())
    assert not [name for name, labels in after if dict(labels).get("model") == "qwen"]
    assert not [name for name, labels in after if "device" in dict(labels)]


def test_wakes_and_prepares_are_counted_with_their_bytes_and_rates(metrics: Metrics) -> None:
    metrics.woke("qwen", 16_000_000_000, 0.32)
    metrics.woke("qwen", 16_000_000_000, 1.6)
    metrics.woke("qwen", 0, 0.0)
    metrics.prepared("qwen", 16_000_000_000, 8.0)
    assert value(metrics, "greenroom_wake_bytes_total", model="qwen") == 32_000_000_000
    name = "greenroom_wake_bytes_per_second"
    assert value(metrics, f"{name}_count", model="qwen") == 2
    assert value(metrics, f"{name}_sum", model="qwen") == pytest.approx(6e10)
    assert value(metrics, f"{name}_bucket", model="qwen", le="12000000000.0") == 1
    assert value(metrics, f"{name}_bucket", model="qwen", le="50000000000.0") == 2
    assert value(metrics, "greenroom_prepare_bytes_total", model="qwen") == 16_000_000_000
    assert value(metrics, "greenroom_prepare_bytes_per_second_sum", model="qwen") == pytest.approx(2e9)


def test_workers_flushes_and_prefetches_are_counted() -> None:
    metrics = Metrics(is_known=lambda name: name == "qwen")
    assert value(metrics, "greenroom_worker_losses_total") == 0
    metrics.worker_started(spare=True)
    metrics.worker_started(spare=False)
    metrics.worker_started(spare=False)
    metrics.worker_lost()
    metrics.flushed("qwen", 4096)
    metrics.prefetched("qwen", 8192)
    metrics.prefetched("made-up", 1)
    assert value(metrics, "greenroom_worker_starts_total", purpose="needed") == 2
    assert value(metrics, "greenroom_worker_starts_total", purpose="spare") == 1
    assert value(metrics, "greenroom_worker_losses_total") == 1
    assert value(metrics, "greenroom_cache_flushed_bytes_total", model="qwen") == 4096
    assert value(metrics, "greenroom_prefetch_bytes_total", model="qwen") == 8192
    assert value(metrics, "greenroom_prefetch_bytes_total", model="unknown") == 1


def test_a_green_room_without_a_bound_has_no_size(metrics: Metrics) -> None:
    bounded = Gauges(green_room_size_mib=64_000, green_room_used_mib=15_320)
    assert value(metrics, "greenroom_green_room_size_mib", bounded) == 64_000
    assert value(metrics, "greenroom_green_room_used_mib", bounded) == 15_320
    assert value(metrics, "greenroom_green_room_size_mib") is None
    assert value(metrics, "greenroom_green_room_used_mib") == 0


def test_every_metric_shown_is_in_the_table_and_the_other_way_round() -> None:
    body, _ = render(Metrics(), Gauges())
    shown = {line.split()[2] for line in body.decode().splitlines() if line.startswith("# TYPE")}
    assert shown == {row.name for row in table.TABLE}
    assert all(name.startswith("greenroom_") for name in shown)


def test_counters_and_nothing_else_end_in_total() -> None:
    body, _ = render(Metrics(), Gauges(log_lines_lost=3))
    kinds = dict(line.split()[2:] for line in body.decode().splitlines() if line.startswith("# TYPE"))
    assert {name for name, kind in kinds.items() if kind == "counter"} == {
        name for name in kinds if name.endswith("_total")
    }
    assert b"greenroom_log_lines_lost_total 3.0" in body.splitlines()


@pytest.mark.slow
def test_fifty_thousand_made_up_ids_do_not_grow_the_series() -> None:
    metrics = Metrics(is_known=lambda name: name == "qwen")
    for number in range(50_000):
        answer(metrics, model=f"made-up-{number}", tenant=f"t{number}", route="chat", status=404)
        metrics.tokens(f"made-up-{number}", f"t{number}", 1, 1, 0)
        metrics.looked_up(f"made-up-{number}", False)
        metrics.rejected(f"made-up-{number}", "model_not_found")
    answer(metrics, tenant="late")
    shown, _ = render(metrics, Gauges())
    lines = set(shown.splitlines())
    assert b'greenroom_requests_total{model="unknown",route="chat",status="404"} 50000.0' in lines
    assert b'greenroom_tenant_requests_total{model="unknown",tenant="other"} 40000.0' in lines
    assert b'greenroom_tenant_requests_total{model="qwen",tenant="other"} 1.0' in lines
    assert b'greenroom_rejections_total{code="model_not_found",model="unknown"} 50000.0' in lines
    assert len(set(re.findall(rb'tenant="([^"]*)"', shown))) == caps.TENANT_SERIES_MAX + 1
    # The shortcuts of the hot path are bounded as well, which shows nowhere else.
    assert set(metrics._request_series) == {("qwen", "chat", 200)}
    assert len(metrics._tenant_series) <= caps.TENANT_SERIES_MAX


def test_names_that_callers_make_up_share_a_label_after_the_first_thousand() -> None:
    metrics = Metrics(is_named=lambda tenant: tenant.startswith("team-"))
    for number in range(10_000):
        answer(metrics, tenant=f"made-up-{number}")
        metrics.tokens("qwen", f"made-up-{number}", 1, 1, 0)
    for number in range(2_000):
        answer(metrics, tenant=f"team-{number}")
    answer(metrics, tenant="")
    shown, _ = render(metrics, Gauges())
    lines = set(shown.splitlines())
    assert b'greenroom_tenant_requests_total{model="qwen",tenant="other"} 9000.0' in lines
    assert b'greenroom_tokens_total{kind="prompt",model="qwen",tenant="other"} 9000.0' in lines
    assert len(set(re.findall(rb'tenant="(made-up-[0-9]*)"', shown))) == caps.UNNAMED_SERIES_MAX
    assert len(set(re.findall(rb'tenant="(team-[0-9]*)"', shown))) == 2_000, "the operator's own have their place"
    assert b'greenroom_tenant_requests_total{model="qwen",tenant=""} 1.0' in lines


def test_ten_thousand_made_up_tenants_do_not_make_a_scrape_long() -> None:
    metrics = Metrics(is_named=lambda tenant: False)
    for number in range(10_000):
        for model in ("qwen", "coder"):
            answer(metrics, model=model, tenant=f"made-up-{number}")
            metrics.tokens(model, f"made-up-{number}", 1, 1, 0)
    assert len(render(metrics, Gauges())[0]) < 500_000


def test_models_routes_and_statuses_are_capped_even_when_all_are_taken_for_real(metrics: Metrics) -> None:
    for number in range(3_000):
        answer(metrics, model=f"m{number}", route=f"r{number}", status=number)
    shown, _ = render(metrics, Gauges())
    counted = re.findall(rb'requests_total{model="(.*?)",route="(.*?)",status="(.*?)"}', shown)
    models, routes, statuses = (set(values) for values in zip(*counted, strict=True))
    assert len(models) == caps.MODELS_MAX + 1
    assert len(routes) == caps.ROUTES_MAX + 1
    assert len(statuses) == 500 + 1


def test_models_that_no_configuration_names_leave_labels_for_those_that_are() -> None:
    metrics = Metrics(is_adhoc=lambda name: name.startswith("found"))
    for number in range(3_000):
        answer(metrics, model=f"found{number}")
    answer(metrics, model="qwen")
    shown, _ = render(metrics, Gauges())
    models = set(re.findall(rb'requests_total{model="(.*?)",route=', shown))
    assert b"qwen" in models and len(models) == caps.ADHOC_MODELS_MAX + 2


def test_label_with_line_break_and_quote_stays_one_label(metrics: Metrics) -> None:
    odd = 'a"b\\c\nd{e}'
    answer(metrics, tenant=odd)
    assert value(metrics, "greenroom_tenant_requests_total", model="qwen", tenant=odd) == 1


def test_a_series_made_in_the_middle_of_a_scrape_does_not_disturb_it() -> None:
    """A garbage collection may let the loop run, wherever one happens."""
    counter = Counter(table.TENANT_REQUESTS)
    for number in range(1_000):
        counter.at("m", str(number))
    numbers, before = itertools.count(1_000), gc.get_threshold()

    def loop_runs(*_: object) -> None:
        counter.at("m", str(next(numbers)))

    gc.callbacks.append(loop_runs)
    gc.set_threshold(100)
    try:
        assert len(counter_family(counter).samples) >= 1_000
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(loop_runs)
    assert next(numbers) > 1_001


def test_rendering_in_a_thread_survives_counting_beside_it(metrics: Metrics) -> None:
    rendered: list[bytes] = []
    failed: list[BaseException] = []

    def scrape() -> None:
        try:
            rendered.extend(render(metrics, Gauges())[0] for _ in range(10))
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=scrape)
    thread.start()
    number = 0
    while thread.is_alive():
        number += 1
        answer(metrics, tenant=f"t{number}")
    thread.join()
    assert not failed
    assert len(rendered) == 10


def test_aliases_are_there_only_if_asked_for_and_tell_what_is_counted() -> None:
    metrics, plain = Metrics(with_aliases=True), Metrics()
    for one in (metrics, plain):
        answer(one, seconds=1.0, wait_s=0.75)
        answer(one, seconds=0.9, wait_s=0.0)
        answer(one, status=503)
        answer(one, tenant="club", status=404)
        for hit in (True, True, False):
            one.prefix_looked_up("qwen", hit)
    now = Gauges(queue_depth={"qwen": 2, "other": 1}, gpus={"GPU-ab": GpuFigures(100, 30, index=1)})
    assert not any(name.startswith("vllm_") for name, _ in series_of(plain, now))

    def seen(name: str, **labels: str) -> float | None:
        return value(metrics, name, now, **labels)

    assert seen("vllm_requests_total", model="qwen", tenant="lab", status="success") == 2
    assert seen("vllm_requests_total", model="qwen", tenant="lab", status="error") == 1
    assert seen("vllm_requests_total", model="qwen", tenant="club", status="error") == 1
    assert seen("greenroom_tenant_requests_total", model="qwen", tenant="lab") == 3
    assert seen("vllm_cache_hit_rate", model="qwen") == pytest.approx(2 / 3)
    assert seen("vllm_queue_depth") == 3
    assert seen("vllm_gpu_memory_used", gpu="1") == 30 * 2**20
    # The wait is not part of it, and errors have none.
    assert seen("vllm_inference_duration_seconds_bucket", model="qwen", le="0.5") == 1
    assert seen("vllm_inference_duration_seconds_bucket", model="qwen", le="1.0") == 2
    assert seen("vllm_inference_duration_seconds_count", model="qwen") == 2
    assert seen("vllm_inference_duration_seconds_sum", model="qwen") == pytest.approx(1.15)


def test_aliases_name_neither_tenants_nor_other_models_to_those_that_may_not_see_them() -> None:
    metrics = Metrics(with_aliases=True)
    for model, tenant in (("qwen", "lab"), ("qwen", "club"), ("shy", "lab")):
        answer(metrics, model=model, tenant=tenant)
        metrics.prefix_looked_up(model, True)
    text = render(metrics, Gauges(), only_models={"qwen"})[0].decode()
    assert 'vllm_requests_total{model="qwen",status="success",tenant="all"} 2.0' in text
    assert "lab" not in text
    assert "shy" not in text


def test_aliases_share_labels_as_all_others_do() -> None:
    metrics = Metrics(is_known=lambda model: model == "qwen", is_named=lambda _: False, with_aliases=True)
    for number in range(caps.UNNAMED_SERIES_MAX + 50):
        answer(metrics, tenant=f"made-up-{number}", model="qwen")
        answer(metrics, model=f"made-up-{number}")
    found = [labels for name, labels in series_of(metrics) if name == "vllm_requests_total"]
    assert len(found) <= 2 * (caps.UNNAMED_SERIES_MAX + 2)
    assert value(metrics, "vllm_inference_duration_seconds_count", model="unknown") == caps.UNNAMED_SERIES_MAX + 50


def test_memory_of_a_gpu_is_split_by_kind() -> None:
    split = {"weights": 20.0, "kv": 7.0, "other": 3.0}
    now = Gauges(gpus={"GPU-ab": GpuFigures(100, 30, split_mib=split)})
    for kind, mib in split.items():
        assert value(Metrics(), "greenroom_gpu_split_mib", now, device="GPU-ab", kind=kind) == mib
