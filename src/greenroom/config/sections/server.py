"""The options of the server: its address, who may call, and limits on what one caller can cost."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from greenroom.config.kinds import (
    COUNT_MAX,
    AllowedHost,
    AllowedOrigin,
    Count,
    HeaderName,
    MibAboveZero,
    NotBool,
    Port,
    PublicUrl,
    Seconds,
    SecondsAboveZero,
    Section,
)
from greenroom.config.marks import FILE, RESTART, Example, Variable, lower
from greenroom.config.reader import Value
from greenroom.config.sections.keys import ApiKey


def _names(text: str) -> Value:
    return [name.strip() for name in text.split(",") if name.strip()]


def _seconds_of_ms(text: str) -> Value:
    try:
        return float(text) / 1000
    except ValueError:
        raise ValueError(f"milliseconds are wanted, not {text!r}") from None


class Heartbeat(StrEnum):
    COMMENT = "comment"
    CHUNK = "chunk"
    OFF = "off"


class MetricsAliases(StrEnum):
    RUNNER_API = "runner-api"


class Server(Section):
    """The address, who may call, and the limits on what one caller can cost."""

    host: Annotated[str, RESTART, Variable("HOST", "Address to listen on.")] = "127.0.0.1"
    """Address to listen on. Anything but loopback needs api_keys, a key_file or signed operations (governance), or
    insecure: true."""
    port: Annotated[Port, RESTART, Variable("PORT", "Port to listen on.")] = 8210
    """Port to listen on; 0 takes a free one."""
    insecure: Annotated[bool, RESTART] = False
    """Allow listening beyond loopback without any API key."""
    api_keys: tuple[ApiKey, ...] = ()
    """Keys that callers must present. Without any, and without a key_file, every caller on the address is trusted."""
    key_file: Annotated[str | None, FILE] = None
    """A file of further keys, by their hashes, which `greenroom key new` and `revoke` change and the gateway follows
    while it runs. With one, every caller needs a key, even while it holds none."""
    allowed_hosts: Annotated[
        tuple[AllowedHost, ...],
        Example(["models.example.org"]),
        Variable("ALLOWED_HOSTS", "Names by which callers reach the gateway, separated by commas.", _names),
    ] = ()
    """Further names in the Host header, beyond loopback names and the listening address, with any port; "*" alone
    allows all. Listening on every address answers programs by any address and any name without a dot, too."""
    allowed_origins: Annotated[tuple[AllowedOrigin, ...], Example(["https://chat.example.org"])] = ()
    """Web origins whose pages may call this server, such as https://chat.example.org; "*" alone allows all."""
    public_url: PublicUrl | None = None
    """How callers reach this server, such as https://models.example.org, for URLs in answers; else by the Host they
    sent. Its host and its pages are allowed."""
    default_model: str | None = None
    """The model of calls to llama.cpp's own routes (/completion, /tokenize …) that name none; without it they are
    refused."""
    forward_headers: Annotated[tuple[HeaderName, ...], Example(["x-trace-id"])] = ()
    """Further request headers passed on to engines; without this only Content-Type and Accept are."""
    header_timeout_s: Annotated[Seconds, RESTART] = 10
    """How long a caller may take to send its headers."""
    body_timeout_s: Annotated[Seconds, RESTART] = 30
    """How long a caller may take to send its body; large bodies get as long as body_rate_min_kib_s allows."""
    body_rate_min_kib_s: Annotated[Count, RESTART] = 8
    """The slowest upload that is still accepted."""
    keepalive_s: Annotated[Seconds, RESTART] = 75
    """How long an idle connection is kept open for the next request."""
    write_timeout_s: Annotated[Seconds, RESTART] = 30
    """A caller that takes no byte of its answer for this long is cut off."""
    connections_max: Annotated[Count, RESTART] = 10_000
    """Open connections at once; more are closed at once."""
    connections_per_ip_max: Annotated[Count, RESTART] = 1_000
    """Open connections from one address; loopback is exempt."""
    headers_max: Annotated[Count, RESTART] = 100
    """Headers in one request."""
    header_bytes_max: Annotated[int, Field(ge=1024, le=COUNT_MAX), NotBool, RESTART] = 32_768
    """Bytes of all headers of one request together."""
    request_line_max: Annotated[int, Field(ge=256, le=COUNT_MAX), NotBool, RESTART] = 8_192
    """Bytes of the request line."""
    body_max_mib: MibAboveZero = 64
    """Largest JSON body."""
    json_values_max: Annotated[int, Field(ge=1_000, le=10_000_000), NotBool] = 100_000
    """Values in a JSON body above 64 KiB: fields of objects, items of lists, objects and lists; lists of numbers hardly
    count. Bodies with more are refused with 400: each value costs time, of which other answers get less."""
    upload_max_mib: MibAboveZero = 1_024
    """Largest multipart or pass-through body (audio, images)."""
    bodies_memory_mib: Annotated[MibAboveZero, RESTART] = 512
    """Memory for all buffered bodies together; when it is full new bodies are refused with 503."""
    bodies_spool_mib: Annotated[MibAboveZero, RESTART] = 8_192
    """Disk for all spooled bodies together. Bodies above 256 KiB are spooled, to files without names in state_dir, of
    whose disk 32 MiB stay free; where that lies in memory (tmpfs) they count towards bodies_memory_mib too."""
    multi_tenant: Annotated[
        bool,
        Variable(
            "ENABLE_MULTI_TENANT",
            "Whether X-Tenant-ID of callers is honoured; tenants of API keys are kept apart in any case.",
        ),
    ] = True
    """Count, queue and cache for each tenant that callers name in X-Tenant-ID; false: the header is ignored, and only
    API keys have tenants."""
    heartbeat: Heartbeat = Heartbeat.COMMENT
    """What a waiting streaming caller receives: an SSE comment, an empty chunk, or nothing."""
    heartbeat_after_s: Seconds = 10
    """Nothing is committed to a streaming caller before this, so that early failures keep their status."""
    heartbeat_every_s: SecondsAboveZero = 10
    """Seconds between heartbeats."""
    wait_max_s: Annotated[
        Seconds,
        Variable(
            "QUEUE_TIMEOUT_MS",
            "How long a request that does not stream waits for its model, in milliseconds.",
            _seconds_of_ms,
        ),
    ] = 290
    """How long a request waits for its model before it is answered 503 model_loading (most clients give up at 300)."""
    stream_wait_max_s: Seconds = 3_600
    """The same for streaming callers, which receive heartbeats meanwhile and can wait longer."""
    answer_idle_max_s: Seconds = 600
    """An answer is cut if its engine sends no byte for this long; 0 = never."""
    drain_s: Seconds = 30
    """How long running answers may go on after SIGTERM."""
    metrics: Annotated[bool, RESTART, Variable("ENABLE_METRICS", "Whether /metrics is served.")] = True
    """Serve /metrics."""
    metrics_port: Annotated[
        Port | None, RESTART, Variable("METRICS_PORT", "A second port, for /metrics and the health checks alone.")
    ] = None
    """A second port on the same address, for /metrics, /health, /healthz and /readyz alone; 0 takes a free one."""
    metrics_aliases: Annotated[
        MetricsAliases | None, RESTART, Variable("METRICS_ALIASES", "runner-api: the runner API's series, too.", lower)
    ] = None
    """runner-api: /metrics has the five series of the runner API (vllm_requests_total …), too."""
    usage_days: Annotated[int, Field(ge=0, le=36_500), NotBool, RESTART] = 400
    """How many days the usage of keys, tenants and models is kept (/api/v1/usage); 0: none is counted."""
    ui: bool = True
    """Serve the dashboard at /ui/, and send browsers there that open /. Its files need no key; its data does."""
    docs: Annotated[bool, RESTART] = True
    """Serve the reference of the API at /api/v1/docs."""
    record_activity: Annotated[str | None, RESTART, FILE] = None
    """CSV file with a row per answered request (time, model, tokens, tenant, seconds); for greenroom simulate."""
    record_events: Annotated[str | None, RESTART, FILE] = None
    """File for every event and effect of the scheduler, to replay its decisions elsewhere."""

    @property
    def has_keys(self) -> bool:
        """True if callers must present a key."""
        return bool(self.api_keys) or self.key_file is not None
