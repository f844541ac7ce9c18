// What waits for what: position, time, reason. Only the rows in sight are asked for, however long the queue is.
import type { ComponentChildren } from "preact";
import { useMemo, useState } from "preact/hooks";
import { get } from "../api";
import { count, seconds } from "../format";
import { models, status } from "../live";
import { Badge, Empty, Figure, PageHead, Problem, Readers } from "../parts/bits";
import { toneOf } from "../parts/memory";
import { Lines, Table, type Column } from "../parts/table";
import { tryTo } from "../parts/toast";
import { usePoll } from "../poll";
import { planReason } from "../reasons";
import { href } from "../route";
import { ModelName } from "./names";

interface Queued {
  id: string;
  position: number;
  model: string;
  asked_as: string;
  tenant: string;
  client: string | null;
  route: string;
  priority: number;
  waited_s: number;
  eta_s: number | null;
  plan: string | null;
  why: string | null;
  behind: string[];
}

interface QueuePage {
  depth: number;
  max: number;
  requests: Queued[];
}

const PAGE_ROWS = 100;
const EVERY_MS = 1500;

export function Queue() {
  return (
    <>
      <PageHead title="Queue" about="Requests that wait, the next one first, and what each of them waits for." />
      <Readers>
        <Waiting />
      </Readers>
    </>
  );
}

function Waiting() {
  const [first, setFirst] = useState(0);
  const offset = Math.max(0, Math.floor(first / PAGE_ROWS) * PAGE_ROWS);
  const { data, error, reload } = usePoll(
    (signal) => get<QueuePage>(`/api/v1/queue?limit=${2 * PAGE_ROWS}&offset=${offset}`, { signal }),
    EVERY_MS,
    [offset],
  );
  const rows = useMemo(() => sparse(data), [data]);
  if (!data) return <Problem>{error}</Problem>;
  const cancel = async (id: string) => {
    await tryTo(async () => {
      await get(`/api/v1/requests/${encodeURIComponent(id)}`, { method: "DELETE" });
      return `${id} was cancelled`;
    });
    reload();
  };
  return (
    <>
      <Problem>{error}</Problem>
      <div class="figures">
        <Figure value={count(data.depth)} name={`waiting, of at most ${count(data.max)}`} tone={data.depth ? "moving" : ""} />
        <Figure value={averageWait()} name="average wait" />
      </div>
      <ByModel rows={data.requests} />
      <Table
        label="Waiting requests"
        columns={columns(cancel)}
        rows={rows}
        rowKey={(row) => (typeof row === "number" ? `row ${row}` : row.id)}
        onRange={setFirst}
        phone={(row) => <Phone row={row} cancel={cancel} />}
        empty={
          <div class="panel">
            <Empty title="Nothing waits">Requests wait here while their model is loaded, or while it answers as many as it can.</Empty>
          </div>
        }
      />
    </>
  );
}

function averageWait(): string {
  const ms = status.value?.queue.avg_wait_ms ?? null;
  return ms === null ? "–" : seconds(ms / 1000);
}

/** All rows by position; those that are not in sight are their number alone. */
function sparse(page: QueuePage | null): (Queued | number)[] {
  const seen = new Map((page?.requests ?? []).map((row) => [row.position, row]));
  return Array.from({ length: page?.depth ?? 0 }, (_, at) => seen.get(at + 1) ?? at + 1);
}

/** What the models wait for, that most requests wait for. */
function ByModel({ rows }: { rows: Queued[] }) {
  const waiting = models.value.filter((model) => model.waiting > 0).sort((one, two) => two.waiting - one.waiting);
  if (!waiting.length) return null;
  const like = new Map(rows.map((row) => [row.model, row]));
  return (
    <ul class="reasons">
      {waiting.slice(0, 8).map((model) => {
        const row = like.get(model.id);
        const reason = row ? planReason(row.plan, row.why, row.behind) : "";
        return (
          <li key={model.id}>
            <i class={`swatch ${toneOf(model.id)}`} aria-hidden="true" />
            <a class="name" href={href("decisions", { model: model.id })}>
              {model.id}
            </a>
            <Badge tone="moving">{count(model.waiting)} waiting</Badge>
            {reason && <span class="quiet-text">{reason}</span>}
          </li>
        );
      })}
    </ul>
  );
}

function Phone({ row, cancel }: { row: Queued | number; cancel: (id: string) => Promise<void> }) {
  if (typeof row === "number") return <Lines first={row} second="" />;
  return (
    <Lines
      first={
        <>
          <ModelName id={row.model} />
          <span class="end">{seconds(row.waited_s)}</span>
        </>
      }
      second={
        <>
          <span>
            {row.position}. {row.tenant || "no tenant"}, priority {row.priority}
            {row.eta_s !== null && `, begins in ~${seconds(row.eta_s)}`}
          </span>
          <button type="button" class="quiet danger end" aria-label={`Cancel ${row.id}`} onClick={() => void cancel(row.id)}>
            Cancel
          </button>
        </>
      }
    />
  );
}

function columns(cancel: (id: string) => Promise<void>): Column<Queued | number>[] {
  const of = (show: (row: Queued) => ComponentChildren) => (row: Queued | number) => (typeof row === "number" ? "" : show(row));
  return [
    { name: "#", width: "2.5rem", right: true, cell: (row) => (typeof row === "number" ? row : row.position) },
    { name: "Model", width: "minmax(7rem, 2fr)", cell: of((row) => <ModelName id={row.model} />) },
    { name: "Tenant", cell: of((row) => row.tenant || "–") },
    { name: "Client", wide: true, cell: of((row) => row.client || "–") },
    { name: "Route", wide: true, width: "minmax(8rem, 1.4fr)", cell: of((row) => <span class="mono">{row.route}</span>) },
    { name: "Priority", wide: true, right: true, width: "4.5rem", cell: of((row) => row.priority) },
    { name: "Waited", right: true, width: "5.5rem", cell: of((row) => seconds(row.waited_s)) },
    { name: "Begins in", wide: true, right: true, width: "6rem", cell: of((row) => (row.eta_s === null ? "–" : `~${seconds(row.eta_s)}`)) },
    {
      name: "",
      width: "5rem",
      right: true,
      cell: of((row) => (
        <button type="button" class="quiet danger" aria-label={`Cancel ${row.id}`} onClick={() => void cancel(row.id)}>
          Cancel
        </button>
      )),
    },
  ];
}
