// Models under version control: what serves, what is kept, update and rollback.
import { useEffect, useState } from "preact/hooks";
import { get, modelPath, post, words } from "../api";
import { ago } from "../format";
import { models } from "../live";
import { Badge, Empty, PageHead, Problem } from "../parts/bits";
import { say } from "../parts/toast";
import { usePoll, useReloadOnEvents } from "../poll";
import type { Model } from "../types";

interface Served {
  model_version: number | null;
  model_repo_id: string | null;
  commit: string | null;
  updating: boolean;
  desired: { model_repo_id: string; revision: string | null } | null;
  error: { code: string; message: string } | null;
}

interface Version {
  model_version: number;
  model_repo_id: string;
  commit: string | null;
  since: number;
  serves: boolean;
}

interface Update {
  taskId: string;
  status: "updating" | "completed" | "failed";
  model_repo_id: string;
  step: string;
  model_version: number | null;
  error: string | null;
}

const STEPS = ["fetching", "checking", "loading", "warming", "flipping"];
const EXAMPLE = `models:
  chat:
    path: /srv/models/chat-7b
    versions: {repo_id: org/chat-7b, keep: 2}`;

export function Versions() {
  const ours = models.value.filter((model) => model.versioned);
  return (
    <>
      <PageHead
        title="Versions"
        about="Change a model's weights while it serves. The new version is loaded beside the old one and proves itself; then the name changes over."
      />
      {ours.map((model) => (
        <Versioned key={model.id} model={model} />
      ))}
      {!ours.length && (
        <div class="panel">
          <Empty title="No model is under version control" command={EXAMPLE}>
            Give a model the key <code>versions</code>:
          </Empty>
        </div>
      )}
    </>
  );
}

function Versioned({ model }: { model: Model }) {
  const [task, setTask] = useState<Update | null>(null);
  const known = usePoll(
    async (signal) => {
      const [served, list] = await Promise.all([
        get<Served>(`/status?model=${encodeURIComponent(model.id)}`, { signal }),
        get<{ data: Version[] }>(modelPath(model.id, "versions"), { signal }),
      ]);
      return { served, versions: list.data };
    },
    5_000,
    [model.id],
  );
  useReloadOnEvents(known.reload, ["operation", "reload"]);
  const begun = (update: Update) => {
    setTask(update);
    known.reload();
  };
  const isBusy = known.data?.served.updating || task?.status === "updating";
  return (
    <section class="panel stack" aria-label={model.id}>
      <div class="task-head">
        <h2>{model.id}</h2>
        {known.data && <Serving served={known.data.served} />}
      </div>
      <Problem>{known.error}</Problem>
      {task?.status === "updating" && <Following task={task} onChange={setTask} onEnd={known.reload} />}
      {!isBusy && known.data?.served.error && (
        <Problem>
          The last update failed, and the version before it serves on. {known.data.served.error.message}
        </Problem>
      )}
      <List versions={known.data?.versions ?? []} model={model.id} isBusy={Boolean(isBusy)} onBegun={begun} />
      <Order model={model.id} repo={known.data?.served.model_repo_id ?? ""} isBusy={Boolean(isBusy)} onBegun={begun} />
    </section>
  );
}

function Serving({ served }: { served: Served }) {
  return (
    <>
      <Badge tone={served.model_version === null ? "" : "ready"}>
        {served.model_version === null ? "no version yet" : `version ${served.model_version} serves`}
      </Badge>
      {served.updating && <Badge tone="moving">updating to {served.desired?.model_repo_id ?? "another version"}</Badge>}
    </>
  );
}

interface Begun {
  model: string;
  isBusy: boolean;
  onBegun: (update: Update) => void;
}

function List({ versions, model, isBusy, onBegun }: Begun & { versions: Version[] }) {
  const back = (version: number) => order(modelPath(model, "rollback"), { version }, onBegun);
  return (
    <table class="version-list">
      <thead>
        <tr>
          <th scope="col">Version</th>
          <th scope="col">Weights</th>
          <th scope="col" class="since">
            Since
          </th>
          <th scope="col">
            <span class="unseen">Action</span>
          </th>
        </tr>
      </thead>
      <tbody>
        {versions.map((one) => (
          <tr key={one.model_version}>
            <td>{one.model_version}</td>
            <td>
              {one.model_repo_id}
              {one.commit && <span class="fine mono"> {one.commit.slice(0, 10)}</span>}
            </td>
            <td class="since">{ago(Date.now() / 1000 - one.since)}</td>
            <td>
              {one.serves ? (
                <Badge tone="ready">serves</Badge>
              ) : (
                <button type="button" disabled={isBusy} aria-label={`Go back to version ${one.model_version}`} onClick={() => void back(one.model_version)}>
                  Go back
                </button>
              )}
            </td>
          </tr>
        ))}
      </tbody>
    </table>
  );
}

function Order({ model, repo, isBusy, onBegun }: Begun & { repo: string }) {
  const [wanted, setWanted] = useState("");
  const [revision, setRevision] = useState("");
  const [gap, setGap] = useState(false);
  const submit = (event: Event) => {
    event.preventDefault();
    const body = { model_repo_id: wanted.trim() || repo, ...(revision.trim() && { revision: revision.trim() }), ...(gap && { allow_gap: true }) };
    void order(modelPath(model, "update"), body, onBegun);
  };
  return (
    <form class="stack" onSubmit={submit}>
      <div class="row">
        <label class="field grow">
          Update to
          <input value={wanted} placeholder={repo || "org/name, or a path below the roots"} spellcheck={false} onInput={(event) => setWanted(event.currentTarget.value)} />
        </label>
        <label class="field">
          Revision
          <input value={revision} placeholder="main" spellcheck={false} onInput={(event) => setRevision(event.currentTarget.value)} />
        </label>
        <button type="submit" class="main low" disabled={isBusy || !(wanted.trim() || repo)}>
          Update
        </button>
      </div>
      <label class="check">
        <input type="checkbox" checked={gap} onChange={(event) => setGap(event.currentTarget.checked)} />
        If both versions do not fit into memory, let requests wait for the change
      </label>
    </form>
  );
}

async function order(path: string, body: unknown, onBegun: (update: Update) => void): Promise<void> {
  try {
    onBegun(await post<Update>(path, body));
  } catch (error) {
    say(words(error), true);
  }
}

/** The steps of an update that this page began. */
function Following({ task, onChange, onEnd }: { task: Update; onChange: (task: Update) => void; onEnd: () => void }) {
  const seen = usePoll((signal) => get<Update>(`/update-model/${encodeURIComponent(task.taskId)}`, { signal }), 700, [task.taskId]);
  const now = seen.data ?? task;
  useEffect(() => {
    if (now.status === "updating") return;
    if (now.status === "completed") say(`Version ${now.model_version} serves.`);
    onChange(now);
    onEnd();
  }, [now.status]);
  const at = STEPS.indexOf(now.step);
  return (
    <ol class="steps" aria-label="Steps of the update">
      {STEPS.map((step, number) => (
        <li key={step} class={number < at ? "done" : number === at ? "now" : ""} aria-current={number === at ? "step" : undefined}>
          {step}
        </li>
      ))}
    </ol>
  );
}
