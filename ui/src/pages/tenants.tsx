// What tenants, keys and clients use, and what is left of their limits.
import { useState } from "preact/hooks";
import { get } from "../api";
import { ago, count, plural, seconds } from "../format";
import { Badge, Empty, PageHead, Problem, Progress, Readers } from "../parts/bits";
import { Table, type Column } from "../parts/table";
import { usePoll } from "../poll";
import "./history.css";

interface Limit {
  kind: "tenant" | "key" | "model";
  name: string;
  requests_per_minute: number | null;
  requests_left: number | null;
  tokens_per_minute: number | null;
  tokens_left: number | null;
  concurrent_max: number | null;
  in_flight: number;
}

interface Used {
  tenant: string | null;
  key: string | null;
  model: string | null;
  requests: number;
  refused: number;
  rate_limited: number;
  failed: number;
  prompt_tokens: number | null;
  completion_tokens: number | null;
  answer_s: number;
}

interface Client {
  key: string | null;
  tenant: string | null;
  client: string | null;
  profile: string | null;
  requests: number;
  requests_per_minute: number;
  models: { model: string; requests: number }[];
  errors: { code: string; count: number }[];
  cooling_down_s: number | null;
  last_seen_s: number;
}

const SINCE: [string, string][] = [
  ["24h", "last 24 hours"],
  ["7d", "last 7 days"],
  ["30d", "last 30 days"],
];
// Those of which most is used.
const LIMITS_SHOWN = 60;
const BY = ["tenant", "key", "model"] as const;

export function Tenants() {
  return (
    <>
      <PageHead title="Tenants and limits" about="Who uses how much, what is left of each limit, and which clients asked lately." />
      <Readers>
        <Limits />
        <Usage />
        <Clients />
      </Readers>
    </>
  );
}

function Limits() {
  const known = usePoll((signal) => get<{ count: number; limits: Limit[] }>(`/api/v1/limits?limit=${LIMITS_SHOWN}`, { signal }), 3000);
  const { error } = known;
  const data = known.data?.limits;
  const more = (known.data?.count ?? 0) - (data?.length ?? 0);
  return (
    <section class="stack" aria-labelledby="limits">
      <h2 id="limits">Limits</h2>
      <Problem>{error}</Problem>
      {data && !data.length && (
        <div class="panel">
          <Empty title="Nothing is limited" command={"tenants:\n  lab: {requests_per_minute: 500, tokens_per_minute: 200000}"}>
            Give a tenant, a key or a model limits in the configuration, and what is left of them is shown here.
          </Empty>
        </div>
      )}
      {data && data.length > 0 && (
        <div class="limits">
          {data.map((limit) => (
            <article key={`${limit.kind} ${limit.name}`} class="panel limit" aria-label={`${limit.kind} ${limit.name}`}>
              <header>
                <h3>{limit.name}</h3>
                <Badge>{limit.kind}</Badge>
              </header>
              <Meter name="requests this minute" max={limit.requests_per_minute} used={spent(limit.requests_per_minute, limit.requests_left)} />
              <Meter name="tokens this minute" max={limit.tokens_per_minute} used={spent(limit.tokens_per_minute, limit.tokens_left)} />
              <Meter name="requests at once" max={limit.concurrent_max} used={limit.in_flight} />
            </article>
          ))}
        </div>
      )}
      {more > 0 && <p class="fine">and {plural(more, "limit")} more, of which less is used</p>}
    </section>
  );
}

function spent(max: number | null, left: number | null): number {
  return Math.max(0, (max ?? 0) - (left ?? 0));
}

function Meter({ name, max, used }: { name: string; max: number | null; used: number }) {
  if (max === null) return null;
  return (
    <div class={used >= max ? "meter full" : "meter"}>
      <span>
        <b>{count(used)}</b> of {plural(max, name.split(" ")[0]!.replace(/s$/, ""))} {name.split(" ").slice(1).join(" ")}
      </span>
      <Progress share={max ? used / max : 1} label={`${count(used)} of ${count(max)} ${name}`} />
    </div>
  );
}

function Usage() {
  const [since, setSince] = useState("24h");
  const [by, setBy] = useState<(typeof BY)[number]>("tenant");
  const { data, error } = usePoll(async (signal) => (await get<{ rows: Used[] }>(`/api/v1/usage?since=${since}&by=${by}`, { signal })).rows, 10_000, [since, by]);
  const columns: Column<Used>[] = [
    { name: by[0]!.toUpperCase() + by.slice(1), width: "minmax(6rem, 2fr)", cell: (row) => row[by] ?? <span class="quiet-text">none</span> },
    { name: "Requests", right: true, cell: (row) => count(row.requests) },
    { name: "Limited", right: true, wide: true, cell: (row) => count(row.rate_limited) },
    { name: "Refused", right: true, wide: true, cell: (row) => count(row.refused) },
    { name: "Failed", right: true, cell: (row) => count(row.failed) },
    { name: "Prompt", right: true, wide: true, cell: (row) => tokens(row.prompt_tokens) },
    { name: "Written", right: true, cell: (row) => tokens(row.completion_tokens) },
    { name: "Answers took", right: true, wide: true, cell: (row) => seconds(row.answer_s) },
  ];
  return (
    <section class="stack" aria-labelledby="usage">
      <div class="section-head">
        <h2 id="usage">Usage</h2>
        <select aria-label="Usage by" value={by} onChange={(event) => setBy(event.currentTarget.value as (typeof BY)[number])}>
          {BY.map((one) => (
            <option key={one} value={one}>
              by {one}
            </option>
          ))}
        </select>
        <select aria-label="Usage since" value={since} onChange={(event) => setSince(event.currentTarget.value)}>
          {SINCE.map(([value, name]) => (
            <option key={value} value={value}>
              {name}
            </option>
          ))}
        </select>
      </div>
      <Problem>{error}</Problem>
      {data && <Table label="Usage" columns={columns} rows={data} rowKey={(row) => String(row[by])} empty={<Nothing title="Nothing was used in this time" />} />}
    </section>
  );
}

function tokens(value: number | null): string {
  return value === null ? "–" : count(value);
}

function Nothing({ title }: { title: string }) {
  return (
    <div class="panel">
      <Empty title={title} command="greenroom chat MODEL">
        A request counts when its answer has ended.
      </Empty>
    </div>
  );
}

const CLIENT_COLUMNS: Column<Client>[] = [
  { name: "Client", width: "minmax(4rem, 1.4fr)", cell: (row) => row.client ?? <span class="quiet-text">not named</span> },
  { name: "Tenant", width: "minmax(4rem, 1fr)", cell: (row) => row.tenant ?? "–" },
  { name: "Key", wide: true, cell: (row) => row.key ?? "–" },
  { name: "Per min", right: true, width: "3.6rem", cell: (row) => count(row.requests_per_minute) },
  { name: "Requests", right: true, wide: true, width: "6rem", cell: (row) => count(row.requests) },
  { name: "Asks mostly", wide: true, width: "minmax(6rem, 1.4fr)", cell: (row) => row.models[0]?.model ?? "–" },
  { name: "Errors", wide: true, width: "minmax(6rem, 1.2fr)", cell: (row) => row.errors.map((error) => `${error.code} ${count(error.count)}`).join(", ") || "–" },
  { name: "Last seen", right: true, width: "minmax(4.6rem, .8fr)", cell: (row) => (row.cooling_down_s === null ? ago(row.last_seen_s < 120 ? row.last_seen_s : 60 * Math.round(row.last_seen_s / 60)) : <Badge tone="bad">cools down {seconds(row.cooling_down_s)}</Badge>) },
];

function Clients() {
  const { data, error } = usePoll(async (signal) => (await get<{ clients: Client[] }>("/api/v1/clients?limit=1000", { signal })).clients, 5000);
  return (
    <section class="stack" aria-labelledby="clients">
      <h2 id="clients">Clients</h2>
      <Problem>{error}</Problem>
      {data && <Table label="Clients" columns={CLIENT_COLUMNS} rows={data} rowKey={(row) => `${row.key} ${row.tenant} ${row.client}`} empty={<Nothing title="No client has asked yet" />} />}
    </section>
  );
}
