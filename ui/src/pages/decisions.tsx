// What the scheduler decided and why, in words; and what it would decide about a request that came now.
import { useEffect, useState } from "preact/hooks";
import { get, post, words } from "../api";
import { clock } from "../format";
import { models } from "../live";
import { Badge, Empty, PageHead, Problem, Readers } from "../parts/bits";
import { Lines, Table, type Column } from "../parts/table";
import { usePoll, useReloadOnEvents } from "../poll";
import { decided, explains, explainsMore, verdict, type Explained } from "../reasons";
import { place, setParams } from "../route";
import type { Decision } from "../types";
import { ModelFilter, ModelName } from "./names";

const SHOWN_MAX = 500;
const KINDS = ["load", "wake", "sleep", "prepare", "unload", "abort", "reject", "cut", "recall"];
const TONES: Record<string, string> = { load: "ready", wake: "ready", prepare: "asleep", sleep: "asleep", reject: "bad", cut: "bad", abort: "bad" };

export function Decisions() {
  const model = place.value.params.get("model") ?? "";
  const [what, setWhat] = useState("");
  return (
    <>
      <PageHead title="Decisions" about="Every load, eviction and refusal, with its reason.">
        <ModelFilter value={model} onChange={(id) => setParams(id ? { model: id } : {})} />
        <select aria-label="Kind of decision" value={what} onChange={(event) => setWhat(event.currentTarget.value)}>
          <option value="">All kinds</option>
          {KINDS.map((kind) => (
            <option key={kind}>{kind}</option>
          ))}
        </select>
      </PageHead>
      <Readers>
        <Explain key={model} model={model} />
        <List model={model} what={what} />
      </Readers>
    </>
  );
}

function List({ model, what }: { model: string; what: string }) {
  const query = `limit=${SHOWN_MAX}${model && `&model=${encodeURIComponent(model)}`}${what && `&what=${what}`}`;
  const { data, error, reload } = usePoll(
    async (signal) => (await get<{ decisions: Decision[] }>(`/api/v1/decisions?${query}`, { signal })).decisions.reverse(),
    0,
    [query],
  );
  useReloadOnEvents(reload);
  if (!data) return <Problem>{error}</Problem>;
  return (
    <>
      <Problem>{error}</Problem>
      <Table
        label="Decisions"
        columns={COLUMNS}
        rows={data}
        rowKey={(row) => String(row.seq)}
        phone={(row) => <Phone row={row} />}
        empty={
          <div class="panel">
            <Empty title="Nothing was decided yet">When a request asks for a model that is not ready, the decision appears here with its reason.</Empty>
          </div>
        }
      />
    </>
  );
}

const COLUMNS: Column<Decision>[] = [
  { name: "Time", width: "4.6rem", cell: (row) => clock(row.at) },
  { name: "Decision", width: "5.5rem", wide: true, cell: (row) => <Badge tone={TONES[row.what] ?? ""}>{row.what}</Badge> },
  { name: "Subject", width: "minmax(6rem, 1.2fr)", cell: (row) => <Subject row={row} /> },
  { name: "Why", width: "minmax(8rem, 4fr)", cell: (row) => <span title={decided(row).text}>{decided(row).text}</span> },
];

function Phone({ row }: { row: Decision }) {
  return (
    <Lines
      first={
        <>
          <Subject row={row} />
          <span class="end">{clock(row.at)}</span>
        </>
      }
      second={<span title={decided(row).text}>{decided(row).text}</span>}
    />
  );
}

function Subject({ row }: { row: Decision }) {
  const { subject } = decided(row);
  return models.value.some((model) => model.id === subject) ? <ModelName id={subject} /> : <span title={subject}>{subject}</span>;
}

/** "What if I asked for X now?" */
function Explain({ model }: { model: string }) {
  const [asked, setAsked] = useState({ model, priority: "", tenant: "", stream: false });
  const [said, setSaid] = useState<Explained | null>(null);
  const [problem, setProblem] = useState("");
  const ask = async () => {
    const { priority, tenant, ...rest } = asked;
    try {
      setSaid(await post<Explained>("/api/v1/explain", { ...rest, ...(priority && { priority }), ...(tenant && { tenant }) }));
      setProblem("");
    } catch (error) {
      setSaid(null);
      setProblem(words(error));
    }
  };
  useEffect(() => {
    if (model) void ask();
  }, []);
  return (
    <section class="panel stack" aria-labelledby="what-if">
      <div class="place-head">
        <h2 id="what-if">What if I asked now?</h2>
        <p>Asking changes nothing</p>
      </div>
      <form class="inline" onSubmit={(event) => (event.preventDefault(), void ask())}>
        <label class="field grow">
          Model or task
          <input
            list="all-models"
            required
            value={asked.model}
            placeholder={models.value[0]?.id ?? "model"}
            onInput={(event) => setAsked({ ...asked, model: event.currentTarget.value })}
          />
          <datalist id="all-models">
            {models.value.map((one) => (
              <option key={one.id} value={one.id} />
            ))}
          </datalist>
        </label>
        <label class="field">
          Priority
          <select value={asked.priority} onChange={(event) => setAsked({ ...asked, priority: event.currentTarget.value })}>
            <option value="">The model's own</option>
            <option value="high">High</option>
            <option value="normal">Normal</option>
            <option value="low">Low</option>
          </select>
        </label>
        <label class="field">
          Tenant
          <input value={asked.tenant} placeholder="none" onInput={(event) => setAsked({ ...asked, tenant: event.currentTarget.value })} />
        </label>
        <label class="check">
          <input type="checkbox" checked={asked.stream} onChange={(event) => setAsked({ ...asked, stream: event.currentTarget.checked })} />
          As a stream
        </label>
        <button type="submit" class="main">
          Explain
        </button>
      </form>
      <Problem>{problem}</Problem>
      <div role="status">{said && <Answer said={said} />}</div>
    </section>
  );
}

const ACTION_TONES = { serve: "ready", join: "busy", swap: "moving", wait: "moving", refuse: "bad" } as const;

function Answer({ said }: { said: Explained }) {
  return (
    <div class="answer">
      <p class="answer-first">
        <Badge tone={ACTION_TONES[said.action]}>{said.action}</Badge>
        {explains(said)}
      </p>
      <ul>
        {explainsMore(said).map((line) => (
          <li key={line}>{line}</li>
        ))}
        {said.candidates.map((one) => (
          <li key={one.model}>
            Candidate {one.model}: {verdict(one.verdict)}
            {one.why && ` (${one.why.replace(/_/g, " ")})`}.
          </li>
        ))}
      </ul>
    </div>
  );
}
