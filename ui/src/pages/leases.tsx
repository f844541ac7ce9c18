// Memory that programs other than models hold, until when, and how to take it back.
import { useState } from "preact/hooks";
import { get } from "../api";
import { mib, seconds } from "../format";
import { deviceNames } from "../live";
import { Badge, Empty, PageHead, Problem } from "../parts/bits";
import { Dialog } from "../parts/dialog";
import { Lines, Table, type Column } from "../parts/table";
import { tryTo } from "../parts/toast";
import { usePoll } from "../poll";
import type { Lease } from "../types";

const EVERY_MS = 2000;

export function Leases() {
  const [withModels, setWithModels] = useState(false);
  const [leaving, setLeaving] = useState<Lease | null>(null);
  const { data, error, reload } = usePoll(
    async (signal) => (await get<{ leases: Lease[] }>("/api/v1/leases", { signal })).leases,
    EVERY_MS,
  );
  const rows = (data ?? []).filter((lease) => withModels || lease.kind === "program");
  return (
    <>
      <PageHead title="Leases" about="GPU memory that training jobs, notebooks and other programs hold by the same scheduler.">
        <label class="check">
          <input type="checkbox" checked={withModels} onChange={(event) => setWithModels(event.currentTarget.checked)} />
          Show models too
        </label>
      </PageHead>
      <Problem>{error}</Problem>
      {data && (
        <Table
          label="Leases"
          columns={columns(setLeaving)}
          rows={rows}
          rowKey={(row) => row.id}
          phone={(row) => <Phone row={row} release={setLeaving} />}
          empty={
            <div class="panel">
              <Empty title="No program holds a lease" command="greenroom lease --mib 8000 -- python train.py">
                A lease evicts idle models as a load would, and ends with its process:
              </Empty>
            </div>
          }
        />
      )}
      {leaving && <Release lease={leaving} onClose={() => setLeaving(null)} onDone={reload} />}
    </>
  );
}

function columns(release: (lease: Lease) => void): Column<Lease>[] {
  return [
    { name: "Name", width: "minmax(7rem, 1.4fr)", cell: (row) => <b>{row.name}</b> },
    { name: "State", width: "7rem", cell: (row) => <LeaseState row={row} /> },
    { name: "Memory", width: "minmax(7rem, 1.4fr)", cell: memory },
    { name: "Holder", wide: true, cell: (row) => (row.holder ? `${row.holder.host}, pid ${row.holder.pid}` : "–") },
    { name: "Priority", wide: true, right: true, width: "5rem", cell: (row) => row.priority },
    { name: "Preemptible", wide: true, width: "6.5rem", cell: (row) => (row.preemptible ? "yes" : "no") },
    { name: "Expires in", wide: true, right: true, width: "7rem", cell: (row) => (row.ttl_s ? seconds(Math.max(0, row.expires_in_s)) : "–") },
    { name: "Id", wide: true, width: "minmax(6rem, 1fr)", cell: (row) => <span class="mono">{row.id}</span> },
    {
      name: "",
      width: "5.5rem",
      right: true,
      cell: (row) =>
        row.kind === "program" && (
          <button type="button" class="quiet danger" aria-label={`Release ${row.name}`} onClick={() => release(row)}>
            Release
          </button>
        ),
    },
  ];
}

function Phone({ row, release }: { row: Lease; release: (lease: Lease) => void }) {
  return (
    <Lines
      first={
        <>
          <b>{row.name}</b>
          <LeaseState row={row} />
          {row.kind === "program" && (
            <button type="button" class="quiet danger end" aria-label={`Release ${row.name}`} onClick={() => release(row)}>
              Release
            </button>
          )}
        </>
      }
      second={<span>{memory(row)}</span>}
    />
  );
}

function LeaseState({ row }: { row: Lease }) {
  if (row.overdue) return <Badge tone="bad">overdue</Badge>;
  if (row.recall_in_s !== null) return <Badge tone="moving">recalled, {seconds(Math.max(0, row.recall_in_s))} left</Badge>;
  return <Badge tone={row.state === "held" ? "ready" : "moving"}>{row.state}</Badge>;
}

function memory(row: Lease): string {
  const held = Object.entries(row.claim).map(([id, amount]) => `${mib(amount)} on ${deviceNames.value.get(id) ?? id}`);
  return held.join(", ") || "nothing yet";
}

function Release({ lease, onClose, onDone }: { lease: Lease; onClose: () => void; onDone: () => void }) {
  const release = async () => {
    onClose();
    await tryTo(async () => {
      await get(`/api/v1/leases/${encodeURIComponent(lease.id)}`, { method: "DELETE" });
      return `${lease.name} was released`;
    });
    onDone();
  };
  return (
    <Dialog title={`Release ${lease.name}?`} onClose={onClose}>
      <p>
        The gateway may then give {memory(lease)} to models. The program is not ended: if it goes on to use the memory, loads there can
        fail.
      </p>
      <div class="actions">
        <button type="button" class="danger" onClick={() => void release()}>
          Release
        </button>
        <button type="button" onClick={onClose}>
          Keep it
        </button>
      </div>
    </Dialog>
  );
}
