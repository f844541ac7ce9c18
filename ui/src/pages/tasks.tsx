// What the gateway is doing for somebody: downloads, loads, updates, jobs. And what lies on its disk.
import "./tasks.css";
import { useEffect, useState } from "preact/hooks";
import { get, post } from "../api";
import { ago, bytes, clock, count, plural, seconds } from "../format";
import { onEvent } from "../live";
import { Badge, Empty, PageHead, Problem, Progress, Readers, Search } from "../parts/bits";
import { Dialog } from "../parts/dialog";
import { Table, type Column } from "../parts/table";
import { tryTo } from "../parts/toast";
import { usePoll, type Polled } from "../poll";

const DOWNLOADS = "/v1/models/download";
const INVENTORY = "/v1/models/inventory";

interface Download {
  job_id: string;
  status: "pending" | "downloading" | "completed" | "failed" | "cancelled";
  model: string;
  progress: number | null;
  bytes: number;
  total_bytes: number | null;
  rate: number | null;
  eta: number | null;
  waiting: boolean;
  files_downloaded: number;
  files_total: number;
  created: number;
  duration_seconds: number | null;
  error: { code: string; message: string } | null;
}

interface Operation {
  id: string;
  kind: "job" | "download" | "load" | "unload" | "update";
  status: "queued" | "running" | "done" | "failed" | "cancelled";
  model: string;
  key: string;
  tenant: string;
  created: number;
  started: number | null;
  ended: number | null;
  error: { code: string; message: string } | null;
}

interface OnDisk {
  id: string;
  kind: string;
  bytes: number;
  quantization: string | null;
  context_length: number | null;
  memory_mib: number | null;
  added: number;
  last_used: number | null;
}

interface Inventory {
  data: OnDisk[];
  problems: { path: string; why: string }[];
  looking: boolean;
}

export function Tasks() {
  return (
    <>
      <PageHead title="Tasks and downloads" about="What runs in the background, what ended within the last hour, and the models on disk." />
      <Readers>
        <Downloads />
        <Operations />
      </Readers>
      <Disk />
    </>
  );
}

/** Asks again every `everyMs`, and at once when an event of one of these kinds comes. */
function useLive<T>(ask: (signal: AbortSignal) => Promise<T>, everyMs: number, kinds: string[]): Polled<T> {
  const polled = usePoll(ask, everyMs);
  useEffect(() => onEvent((event) => kinds.includes(event.kind) && polled.reload()), []);
  return polled;
}

// --- downloads ---------------------------------------------------------------------------------------------------------

function Downloads() {
  const list = useLive((signal) => get<{ data: Download[] }>(DOWNLOADS, { signal }), 5_000, ["download"]);
  const rows = list.data?.data ?? [];
  return (
    <section class="panel stack" aria-labelledby="downloads">
      <h2 id="downloads">Downloads</h2>
      <Pull onBegun={list.reload} />
      <Problem>{list.error}</Problem>
      <ul class="tasks">
        {rows.map((row) => (
          <DownloadRow key={row.job_id} row={row} onChange={list.reload} />
        ))}
      </ul>
      {list.data && !rows.length && <p class="nobody">No download runs, and none ended within the last hour.</p>}
    </section>
  );
}

function Pull({ onBegun }: { onBegun: () => void }) {
  const [model, setModel] = useState("");
  const [quantization, setQuantization] = useState("");
  const submit = async (event: Event) => {
    event.preventDefault();
    const begun = await tryTo(async () => {
      await post(DOWNLOADS, { model: model.trim(), ...(quantization.trim() && { quantization: quantization.trim() }) });
      return `The download of ${model.trim()} has begun.`;
    });
    if (begun) setModel("");
    onBegun();
  };
  return (
    <form class="row" onSubmit={(event) => void submit(event)}>
      <label class="field grow">
        Model on the hub
        <input value={model} placeholder="org/name" spellcheck={false} autocomplete="off" onInput={(event) => setModel(event.currentTarget.value)} />
      </label>
      <label class="field">
        Quantisation
        <input value={quantization} placeholder="Q4_K_M, or all" spellcheck={false} onInput={(event) => setQuantization(event.currentTarget.value)} />
      </label>
      <button type="submit" class="main low" disabled={!model.trim()}>
        Pull
      </button>
    </form>
  );
}

const DOWNLOAD_TONES = { pending: "", downloading: "busy", completed: "ready", failed: "bad", cancelled: "" } as const;

function DownloadRow({ row, onChange }: { row: Download; onChange: () => void }) {
  const isOver = row.status === "completed" || row.status === "failed" || row.status === "cancelled";
  const cancel = async () => {
    await tryTo(async () => {
      await get(`${DOWNLOADS}/${encodeURIComponent(row.job_id)}`, { method: "DELETE" });
      return `The download of ${row.model} is cancelled. What was fetched stays.`;
    });
    onChange();
  };
  return (
    <li>
      <div class="task-head">
        <b class="name">{row.model}</b>
        <Badge tone={DOWNLOAD_TONES[row.status]}>{row.waiting ? "waits for another program" : row.status}</Badge>
        <span class="fine right">{isOver ? ended(row) : running(row)}</span>
        {!isOver && (
          <button type="button" class="quiet" aria-label={`Cancel the download of ${row.model}`} onClick={() => void cancel()}>
            Cancel
          </button>
        )}
      </div>
      {!isOver && <Progress share={row.progress} label={`Download of ${row.model}`} />}
      {row.error && <Problem>{row.error.message}</Problem>}
    </li>
  );
}

function running(row: Download): string {
  const parts = [row.total_bytes ? `${bytes(row.bytes)} of ${bytes(row.total_bytes)}` : bytes(row.bytes)];
  if (row.rate) parts.push(`${bytes(row.rate)}/s`);
  if (row.eta !== null) parts.push(`${seconds(row.eta)} left`);
  return parts.join(", ");
}

function ended(row: Download): string {
  const took = row.duration_seconds === null ? "" : ` in ${seconds(row.duration_seconds)}`;
  return row.total_bytes ? `${bytes(row.total_bytes)}${took}` : clock(row.created);
}

// --- operations --------------------------------------------------------------------------------------------------------

const STATUS_TONES = { queued: "", running: "busy", done: "ready", failed: "bad", cancelled: "" } as const;

const OPERATION_COLUMNS: Column<Operation>[] = [
  { name: "What", width: "5rem", cell: (row) => row.kind },
  { name: "Model", width: "minmax(0, 2fr)", cell: (row) => <span title={row.model}>{row.model}</span> },
  { name: "Status", width: "5.5rem", cell: (row) => <Badge tone={STATUS_TONES[row.status]}>{row.status}</Badge> },
  { name: "Began", width: "5.5rem", cell: (row) => clock(row.started ?? row.created), wide: true },
  { name: "Took", width: "6rem", right: true, wide: true, cell: (row) => took(row) },
  { name: "By", width: "minmax(0, 1fr)", wide: true, cell: (row) => row.key || row.tenant },
  { name: "Why it failed", width: "minmax(0, 3fr)", wide: true, cell: (row) => <span title={row.error?.message}>{row.error?.message}</span> },
];

function took(row: Operation): string {
  if (row.started === null) return "";
  return seconds(Math.max(0, (row.ended ?? Date.now() / 1000) - row.started));
}

function Operations() {
  const list = useLive((signal) => get<{ data: Operation[] }>("/api/v1/operations?limit=200", { signal }), 5_000, ["operation", "download"]);
  const rows = list.data?.data ?? [];
  return (
    <section class="stack" aria-labelledby="operations">
      <h2 id="operations">Loads, unloads, updates and jobs</h2>
      <Problem>{list.error}</Problem>
      {list.data && (
        <Table
          label="Operations"
          columns={OPERATION_COLUMNS}
          rows={rows}
          rowKey={(row) => row.id}
          empty={
            <div class="panel">
              <Empty title="Nothing was ordered within the last hour" command="greenroom load MODEL">
                Loads and unloads that somebody asks for are listed here. Those that the gateway decides by itself are on the page Decisions.
              </Empty>
            </div>
          }
        />
      )}
    </section>
  );
}

// --- models on disk ----------------------------------------------------------------------------------------------------

function Disk() {
  const list = useLive((signal) => get<Inventory>(INVENTORY, { signal }), 15_000, ["download"]);
  const [wanted, setWanted] = useState("");
  const [doomed, setDoomed] = useState<OnDisk | null>(null);
  const all = list.data?.data ?? [];
  const rows = all.filter((row) => row.id.toLowerCase().includes(wanted.toLowerCase()));
  const total = all.reduce((sum, row) => sum + row.bytes, 0);
  return (
    <section class="stack" aria-labelledby="disk">
      <div class="row middle">
        <h2 id="disk">On disk</h2>
        {list.data && (
          <span class="fine">
            {plural(all.length, "model")}, {bytes(total)}
            {list.data.looking && ", still looking"}
          </span>
        )}
        {all.length > 8 && <Search value={wanted} onChange={setWanted} label="Find a model" />}
      </div>
      <Problem>{list.error}</Problem>
      {list.data?.problems.map((problem) => (
        <p key={problem.path} class="fine">
          Left out: {problem.path}: {problem.why}
        </p>
      ))}
      {list.data && (
        <Table
          label="Models on disk"
          columns={diskColumns(setDoomed)}
          rows={rows}
          rowKey={(row) => row.id}
          empty={
            <div class="panel">
              <Empty title="No models below the roots" command="greenroom pull Qwen/Qwen3-0.6B-GGUF">
                Name folders in <code>library.roots</code>, or fetch a model:
              </Empty>
            </div>
          }
        />
      )}
      {doomed && <Delete model={doomed} onClose={() => setDoomed(null)} onDone={list.reload} />}
    </section>
  );
}

function diskColumns(onDelete: (row: OnDisk) => void): Column<OnDisk>[] {
  return [
    { name: "Model", width: "minmax(0, 3fr)", cell: (row) => <span title={row.id}>{row.id}</span> },
    { name: "Kind", width: "7rem", wide: true, cell: (row) => row.kind },
    { name: "Quantisation", width: "7rem", wide: true, cell: (row) => row.quantization ?? "" },
    { name: "Context", width: "6rem", wide: true, right: true, cell: (row) => (row.context_length === null ? "" : count(row.context_length)) },
    { name: "Size", width: "6rem", right: true, cell: (row) => bytes(row.bytes) },
    { name: "Last used", width: "8rem", wide: true, cell: (row) => (row.last_used === null ? "never" : ago(Date.now() / 1000 - row.last_used)) },
    {
      name: "",
      width: "5.5rem",
      right: true,
      cell: (row) => (
        <button type="button" class="quiet danger" aria-label={`Delete ${row.id}`} onClick={() => onDelete(row)}>
          Delete
        </button>
      ),
    },
  ];
}

function Delete({ model, onClose, onDone }: { model: OnDisk; onClose: () => void; onDone: () => void }) {
  const [force, setForce] = useState(false);
  const act = async () => {
    onClose();
    await tryTo(async () => {
      const path = `${INVENTORY}/${encodeURIComponent(model.id)}${force ? "?force=true" : ""}`;
      const done = await get<{ bytes_freed: number }>(path, { method: "DELETE" });
      return `${model.id} is deleted; ${bytes(done.bytes_freed)} came free.`;
    });
    onDone();
  };
  return (
    <Dialog title={`Delete ${model.id}?`} onClose={onClose}>
      <p>
        Its files leave the disk: {bytes(model.bytes)}. To have it again it must be fetched again.
      </p>
      <label class="check">
        <input type="checkbox" checked={force} onChange={(event) => setForce(event.currentTarget.checked)} />
        Also if it is configured, loaded or asleep; it is unloaded first
      </label>
      <div class="actions">
        <button type="button" class="danger" onClick={() => void act()}>
          Delete
        </button>
        <button type="button" onClick={onClose}>
          Keep it
        </button>
      </div>
    </Dialog>
  );
}
