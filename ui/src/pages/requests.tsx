// Requests that run or ended lately: their timings, tokens, and what went wrong.
import { useState } from "preact/hooks";
import { get } from "../api";
import { clock, count, seconds } from "../format";
import { Badge, Empty, PageHead, Problem, Readers } from "../parts/bits";
import { Dialog } from "../parts/dialog";
import { Lines, Table, type Column } from "../parts/table";
import { tryTo } from "../parts/toast";
import { usePoll } from "../poll";
import { place, setParams } from "../route";
import type { RequestRecord } from "../types";
import { ModelFilter, ModelName } from "./names";

const EVERY_MS = 1000;
// Asked for every second; all that the gateway keeps, only when asked, and less often.
const FEW = 150;
const ALL = 2000;
const ALL_EVERY_MS = 5000;
type Which = "all" | "running" | "failed";

export function Requests() {
  const model = place.value.params.get("model") ?? "";
  const [which, setWhich] = useState<Which>("all");
  return (
    <>
      <PageHead title="Requests" about="What runs now and what ended lately, with the time each part took.">
        <ModelFilter value={model} onChange={(id) => setParams(id ? { model: id } : {})} />
        <Choice value={which} onChange={setWhich} />
      </PageHead>
      <Readers>
        <List model={model} which={which} />
      </Readers>
    </>
  );
}

function Choice({ value, onChange }: { value: Which; onChange: (value: Which) => void }) {
  const words: [Which, string][] = [
    ["all", "All"],
    ["running", "Running"],
    ["failed", "Failed"],
  ];
  return (
    <div class="choice" role="group" aria-label="Which requests">
      {words.map(([one, text]) => (
        <button key={one} type="button" aria-pressed={one === value} onClick={() => onChange(one)}>
          {text}
        </button>
      ))}
    </div>
  );
}

function List({ model, which }: { model: string; which: Which }) {
  const [limit, setLimit] = useState(FEW);
  const query = `limit=${limit}${model && `&model=${encodeURIComponent(model)}`}`;
  const { data, error, reload } = usePoll(
    async (signal) => (await get<{ requests: RequestRecord[] }>(`/api/v1/requests?${query}`, { signal })).requests,
    limit === FEW ? EVERY_MS : ALL_EVERY_MS,
    [query],
  );
  const picked = place.value.params.get("id");
  if (!data) return <Problem>{error}</Problem>;
  const rows = data.filter((one) => which === "all" || (which === "running" ? one.state !== "done" : isFailed(one)));
  const longest = Math.max(0.001, ...rows.map((one) => elapsed(one) ?? 0));
  const close = () => setParams(model ? { model } : {});
  return (
    <>
      <Problem>{error}</Problem>
      <Table
        label="Requests"
        columns={columns(longest)}
        rows={rows}
        rowKey={(row) => row.id}
        phone={(row) => <Phone row={row} />}
        onPick={(row) => setParams({ ...(model && { model }), id: row.id })}
        isPicked={(row) => row.id === picked}
        empty={<None model={model} which={which} />}
      />
      {data.length === FEW && limit === FEW && (
        <p class="fine">
          The latest {FEW}.{" "}
          <button type="button" class="quiet" onClick={() => setLimit(ALL)}>
            Show all that are kept
          </button>
        </p>
      )}
      {picked && <Details id={picked} onClose={close} onChange={reload} />}
    </>
  );
}

function None({ model, which }: { model: string; which: Which }) {
  if (which !== "all") return <div class="panel"><Empty title={which === "running" ? "Nothing runs now" : "No request failed lately"} /></div>;
  return (
    <div class="panel">
      <Empty title="No requests yet" command={`greenroom chat ${model || "MODEL"} "Hello"`}>
        Ask a model, and its request appears here:
      </Empty>
    </div>
  );
}

function isFailed(one: RequestRecord): boolean {
  return one.error_code !== null || (one.status !== null && one.status >= 400);
}

/** Seconds from its arrival until its end, or until now. */
function elapsed(one: RequestRecord): number | null {
  return one.total_s ?? Math.max(0, Date.now() / 1000 - one.arrived_at);
}

/** Seconds in the queue, so far. */
function waited(one: RequestRecord): number | null {
  return one.wait_s ?? (one.state === "waiting" ? elapsed(one) : null);
}

/** Tokens a second while it was answered; null where there is nothing to divide. */
function speed(one: RequestRecord): number | null {
  const begun = one.stream ? one.first_byte_s : one.wait_s;
  const end = elapsed(one);
  if (!one.completion_tokens || begun === null || end === null || end - begun < 0.01) return null;
  return one.completion_tokens / (end - begun);
}

function columns(longest: number): Column<RequestRecord>[] {
  return [
    { name: "Arrived", width: "4.6rem", wide: true, cell: (row) => clock(row.arrived_at) },
    { name: "Model", width: "minmax(7rem, 2.4fr)", cell: (row) => <ModelName id={row.model} /> },
    { name: "State", width: "minmax(5.6rem, .9fr)", cell: (row) => <Outcome row={row} /> },
    { name: "Tenant", wide: true, width: "minmax(4rem, 1.1fr)", cell: (row) => row.tenant || "–" },
    { name: "Route", wide: true, width: "minmax(4.5rem, 1fr)", cell: (row) => <span class="mono">{row.route}</span> },
    { name: "Timing", wide: true, width: "minmax(7rem, 1.4fr)", cell: (row) => <Timing row={row} longest={longest} /> },
    { name: "Waited", wide: true, right: true, width: "4.6rem", cell: (row) => known(waited(row), seconds) },
    { name: "First", wide: true, right: true, width: "4.2rem", cell: (row) => known(row.first_byte_s, seconds) },
    { name: "Total", right: true, width: "4.6rem", cell: (row) => known(row.total_s, seconds) },
    { name: "Tokens", wide: true, right: true, width: "5.6rem", cell: (row) => tokens(row) },
    { name: "Tokens/s", wide: true, right: true, width: "4.6rem", cell: (row) => known(speed(row), (value) => value.toFixed(value < 10 ? 1 : 0)) },
  ];
}

function Phone({ row }: { row: RequestRecord }) {
  const said = [clock(row.arrived_at), row.tenant, row.route].filter(Boolean).join(" · ");
  return (
    <Lines
      first={
        <>
          <ModelName id={row.model} />
          <span class="end">{known(row.total_s ?? elapsed(row), seconds)}</span>
        </>
      }
      second={
        <>
          <Outcome row={row} />
          <span>{said}</span>
        </>
      }
    />
  );
}

function known(value: number | null, format: (value: number) => string): string {
  return value === null ? "–" : format(value);
}

function tokens(row: RequestRecord): string {
  if (row.prompt_tokens === null && row.completion_tokens === null) return "–";
  return `${row.prompt_tokens === null ? "?" : count(row.prompt_tokens)} → ${row.completion_tokens === null ? "?" : count(row.completion_tokens)}`;
}

function Outcome({ row }: { row: RequestRecord }) {
  if (row.state === "waiting") return <Badge tone="moving">waiting</Badge>;
  if (row.state === "serving") return <Badge tone="busy">answering</Badge>;
  if (isFailed(row)) return <Badge tone="bad">{row.error_code ?? row.status}</Badge>;
  return <Badge tone="ready">{row.status ?? "done"}</Badge>;
}

/** Where its time went: in the queue, until the first byte, and after it. On the scale of the longest row. */
function Timing({ row, longest }: { row: RequestRecord; longest: number }) {
  const end = elapsed(row) ?? 0;
  const wait = Math.min(waited(row) ?? 0, end);
  const first = Math.min(Math.max(row.first_byte_s ?? end, wait), end);
  const width = (from: number, to: number) => ({ width: `${(100 * (to - from)) / longest}%` });
  const said = `waited ${seconds(wait)}, first byte after ${seconds(first)}, ended after ${seconds(end)}`;
  return (
    <div class="timing" role="img" aria-label={said} title={said}>
      <div class="waited" style={width(0, wait)} />
      <div class="first" style={width(wait, first)} />
      <div class="rest" style={width(first, end)} />
    </div>
  );
}

function Details({ id, onClose, onChange }: { id: string; onClose: () => void; onChange: () => void }) {
  const { data: one, error, reload } = usePoll((signal) => get<RequestRecord>(`/api/v1/requests/${encodeURIComponent(id)}`, { signal }), EVERY_MS, [id]);
  const cancel = async () => {
    await tryTo(async () => {
      await get(`/api/v1/requests/${encodeURIComponent(id)}`, { method: "DELETE" });
      return `${id} was cancelled`;
    });
    reload();
    onChange();
  };
  return (
    <Dialog kind="drawer" title={id} onClose={onClose}>
      <Problem>{error}</Problem>
      {one && (
        <>
          <p class="drawer-state">
            <Outcome row={one} />
            <ModelName id={one.model} />
            {one.stream && <Badge>stream</Badge>}
          </p>
          <Timing row={one} longest={elapsed(one) || 0.001} />
          {one.state !== "done" && (
            <div class="actions">
              <button type="button" class="danger" onClick={() => void cancel()}>
                Cancel this request
              </button>
            </div>
          )}
          {(one.reason ?? one.error_message) && <Problem>{one.reason ?? one.error_message}</Problem>}
          <Facts one={one} />
          {one.details && (
            <section class="logs" aria-label="Its engine's last lines">
              <h3>Its engine's last lines</h3>
              <pre tabIndex={0}>{one.details}</pre>
            </section>
          )}
        </>
      )}
    </Dialog>
  );
}

function Facts({ one }: { one: RequestRecord }) {
  const cached = one.cached_tokens === null ? "" : `, ${count(one.cached_tokens)} of the prompt's from the cache`;
  const facts: [string, string | null][] = [
    ["Arrived", clock(one.arrived_at)],
    ["Asked as", one.asked_as],
    ["Tenant", one.tenant || null],
    ["Client", one.client],
    ["Route", one.route],
    ["Priority", String(one.priority)],
    ["Waited", known(one.wait_s, seconds)],
    ["First byte after", known(one.first_byte_s, seconds)],
    ["Ended after", known(one.total_s, seconds)],
    ["Tokens", `${tokens(one)}${one.estimated ? " (counted by the gateway)" : ""}${cached}`],
    ["Speed", speed(one) === null ? null : `${speed(one)!.toFixed(1)} tokens/s`],
    ["Engine computed", one.gpu_time_ms === null ? null : seconds(one.gpu_time_ms / 1000)],
    ["Sound", one.audio_s === null ? null : seconds(one.audio_s)],
    ["Pictures", one.pictures === null ? null : String(one.pictures)],
    ["Version", one.model_version === null ? null : `${one.model_version}${one.model_repo_id ? ` (${one.model_repo_id})` : ""}`],
    ["Slot", one.slot],
    ["Status", one.status === null ? null : String(one.status)],
  ];
  return (
    <dl class="facts">
      {facts.map(
        ([name, value]) =>
          value !== null && (
            <div key={name}>
              <dt>{name}</dt>
              <dd>{value}</dd>
            </div>
          ),
      )}
    </dl>
  );
}
