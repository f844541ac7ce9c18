// The configuration that counts: each value with its source, what `check` says of the file, and reload.
import { useState } from "preact/hooks";
import { get, post, words } from "../api";
import { plural, seconds } from "../format";
import { Badge, Command, Empty, PageHead, Problem, Readers, Search } from "../parts/bits";
import { Table, type Column } from "../parts/table";
import { say } from "../parts/toast";
import { usePoll } from "../poll";

interface Value {
  key: string;
  value: unknown;
  source: "file" | "environment" | "default" | "other" | null;
  variable: string | null;
}

interface Changes {
  added: string[];
  changed: string[];
  relabelled: string[];
  removed: string[];
  at_once: string[];
  needs_restart: string[];
}

interface Effective {
  file: string | null;
  values: Value[];
  check: { problems: string[]; warnings: string[] };
  pending: Changes | null;
}

const EVERY_MS = 10_000;

export function Config() {
  return (
    <>
      <PageHead title="Config" about="What the gateway runs with, where each value is from, and what a reload would change." />
      <Readers>
        <Whole />
      </Readers>
    </>
  );
}

function Whole() {
  const known = usePoll((signal) => get<Effective>("/api/v1/config/effective", { signal }), EVERY_MS);
  const seen = known.data;
  if (!seen) return known.error ? <Problem>{known.error}</Problem> : <p class="fine">Reading the configuration …</p>;
  return (
    <>
      <Problem>{known.error}</Problem>
      <File seen={seen} onReloaded={known.reload} />
      <Values values={seen.values} />
    </>
  );
}

function File({ seen, onReloaded }: { seen: Effective; onReloaded: () => void }) {
  const { file, check, pending } = seen;
  const isFine = !check.problems.length;
  return (
    <section class="panel stack" aria-labelledby="config-file">
      <div class="task-head">
        <h2 id="config-file">{file ?? "No configuration file"}</h2>
        {file !== null && <Badge tone={isFine ? "ready" : "bad"}>{isFine ? "can be used" : "cannot be used"}</Badge>}
        {check.warnings.length > 0 && <Badge tone="moving">{plural(check.warnings.length, "warning")}</Badge>}
        {file !== null && (
          <span class="right">
            <Reload isMain={pending !== null && !isEmpty(pending)} isFine={isFine} onReloaded={onReloaded} />
          </span>
        )}
      </div>
      {file === null && <p class="about">The gateway was started without a file. Write one, and start it with:</p>}
      {file === null && <Command text="greenroom serve --config greenroom.yaml" />}
      {check.problems.length > 0 && (
        <Problem>
          {`What runs goes on. A reload would be refused:\n${check.problems.join("\n")}`}
        </Problem>
      )}
      {pending && <Pending changes={pending} />}
      {check.warnings.length > 0 && (
        <ul class="warnings">
          {check.warnings.map((warning) => (
            <li key={warning}>{warning}</li>
          ))}
        </ul>
      )}
    </section>
  );
}

const CHANGE_WORDS: [keyof Changes, string][] = [
  ["added", "New models"],
  ["changed", "Models that get a new engine"],
  ["relabelled", "Models whose description changes"],
  ["removed", "Models that leave"],
  ["at_once", "Keys that change at once"],
  ["needs_restart", "Keys that need a restart; until then a reload is refused"],
];

function isEmpty(changes: Changes): boolean {
  return CHANGE_WORDS.every(([kind]) => !changes[kind].length);
}

function Pending({ changes }: { changes: Changes }) {
  if (isEmpty(changes)) return <p class="fine">The gateway runs what the file says.</p>;
  return (
    <div class="stack">
      <p>The file has changed since it was read. A reload would change:</p>
      <dl class="facts">
        {CHANGE_WORDS.filter(([kind]) => changes[kind].length).map(([kind, name]) => (
          <div key={kind}>
            <dt>{name}</dt>
            <dd>{changes[kind].join(", ")}</dd>
          </div>
        ))}
      </dl>
    </div>
  );
}

function Reload({ isMain, isFine, onReloaded }: { isMain: boolean; isFine: boolean; onReloaded: () => void }) {
  const [isBusy, setBusy] = useState(false);
  const act = async () => {
    setBusy(true);
    try {
      const done = await post<Omit<Changes, "needs_restart"> & { took_s: number }>("/api/v1/reload");
      const models = done.added.length + done.changed.length + done.relabelled.length + done.removed.length;
      say(`Reloaded in ${seconds(done.took_s)}: ${plural(models, "model")} and ${plural(done.at_once.length, "key")} changed.`);
    } catch (error) {
      say(words(error), true);
    }
    setBusy(false);
    onReloaded();
  };
  return (
    <button type="button" class={isMain ? "main" : ""} disabled={isBusy || !isFine} onClick={() => void act()}>
      {isBusy ? "Reloading …" : "Reload"}
    </button>
  );
}

const SOURCES = { file: "the file", environment: "the environment", default: "default", other: "command line, or another key" } as const;

const COLUMNS: Column<Value>[] = [
  { name: "Key", width: "minmax(0, 3fr)", cell: (row) => <code title={row.key}>{row.key}</code> },
  { name: "Value", width: "minmax(0, 3fr)", cell: (row) => <code title={shown(row.value)}>{shown(row.value)}</code> },
  { name: "From", width: "minmax(0, 2fr)", wide: true, cell: (row) => from(row) },
];

function shown(value: unknown): string {
  return typeof value === "string" ? value : JSON.stringify(value);
}

function from({ source, variable }: Value): string {
  return variable ?? (source === null ? "not known while the file cannot be used" : SOURCES[source]);
}

function Values({ values }: { values: Value[] }) {
  const [wanted, setWanted] = useState("");
  const [onlySet, setOnlySet] = useState(true);
  const rows = values.filter(
    (row) => (!onlySet || row.source !== "default") && `${row.key} ${shown(row.value)}`.toLowerCase().includes(wanted.toLowerCase()),
  );
  return (
    <section class="stack values" aria-labelledby="values">
      <div class="row middle">
        <h2 id="values">Values</h2>
        <label class="check">
          <input type="checkbox" checked={onlySet} onChange={(event) => setOnlySet(event.currentTarget.checked)} />
          Without defaults
        </label>
        <Search value={wanted} onChange={setWanted} label="Find a key or a value" />
      </div>
      <Table
        label="Values"
        columns={COLUMNS}
        rows={rows}
        rowKey={(row) => row.key}
        rowClass={(row) => (row.source === "default" ? "faint" : "")}
        empty={
          <div class="panel">
            <Empty title={wanted ? "No key and no value has these words" : "Every value is a default"}>
              All keys are described in docs/configuration.md.
            </Empty>
          </div>
        }
      />
    </section>
  );
}
