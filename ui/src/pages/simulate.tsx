// "Would another GPU help?": the recorded requests, played again with other hardware or another policy, side by side.
import { useState } from "preact/hooks";
import { get, post, words } from "../api";
import { count, mib, percent, plural, seconds } from "../format";
import { Empty, PageHead, Problem, Progress, Readers } from "../parts/bits";
import { usePoll } from "../poll";
import "./history.css";

interface Input {
  requests: number;
  seconds: number;
  source: "recording" | "memory";
  gpus: number;
  gpu_mib: number | null;
  policy: string;
  policies: string[];
}

interface Case {
  policy: string;
  gpus: number | null;
  gpu_mib: number | null;
  green_room_mib: number | null;
  concurrency: number | null;
  requests: number;
  served: number;
  lost: number;
  swaps: number;
  busy: number;
  waits: { count: number; mean_s: number; p50_s: number; p95_s: number; max_s: number };
  delays: { not_there_s: number; full_s: number; slow_s: number; bottleneck: string | null };
}

interface Simulated {
  assumed: string[];
  bottom_line: string[];
  cases: Case[];
}

interface Choice {
  gpus: string;
  gpu_mib: string;
  green_room_mib: string;
  policies: string[];
  rate: string;
}

export function Simulate() {
  return (
    <>
      <PageHead title="Simulate" about="Would another GPU help? The requests that came, played again through the scheduler. Nothing on this gateway changes." />
      <Readers>
        <Question />
      </Readers>
    </>
  );
}

function Question() {
  const { data: input, error } = usePoll((signal) => get<Input>("/api/v1/simulate", { signal }), 0);
  if (!input) return <Problem>{error}</Problem>;
  return <Form input={input} />;
}

function Form({ input }: { input: Input }) {
  const [choice, setChoice] = useState<Choice>({
    gpus: input.gpus ? `${input.gpus}, ${input.gpus + 1}` : "1, 2",
    gpu_mib: input.gpu_mib === null ? "24576" : "",
    green_room_mib: "",
    policies: [input.policy],
    rate: input.requests ? "" : "0.5",
  });
  const [said, setSaid] = useState<Simulated | null>(null);
  const [problem, setProblem] = useState("");
  const [running, setRunning] = useState(false);
  const play = async () => {
    setRunning(true);
    setProblem("");
    try {
      setSaid(await post<Simulated>("/api/v1/simulate", orderOf(choice)));
    } catch (error) {
      setProblem(words(error));
    }
    setRunning(false);
  };
  const set = (part: Partial<Choice>) => setChoice({ ...choice, ...part });
  return (
    <>
      <form
        class="panel simulate"
        onSubmit={(event) => {
          event.preventDefault();
          void play();
        }}
      >
        <p class="quiet-text">{about(input)}</p>
        <div class="fields">
          <Field name="Number of GPUs" value={choice.gpus} hint={`now ${input.gpus}`} onChange={(gpus) => set({ gpus })} />
          <Field name="Memory of each GPU, MiB" value={choice.gpu_mib} hint={input.gpu_mib === null ? "such as 24576" : `now ${count(input.gpu_mib)}`} onChange={(gpu_mib) => set({ gpu_mib })} />
          <Field name="Green room, MiB" value={choice.green_room_mib} hint="such as 0, 65536" onChange={(green_room_mib) => set({ green_room_mib })} />
          <Field name="Draw requests, per second" value={choice.rate} hint={input.requests ? "recorded ones" : "such as 0.5"} onChange={(rate) => set({ rate })} />
        </div>
        <fieldset>
          <legend>Policies</legend>
          {input.policies.map((policy) => (
            <label key={policy} class="check">
              <input
                type="checkbox"
                checked={choice.policies.includes(policy)}
                onChange={(event) => set({ policies: event.currentTarget.checked ? [...choice.policies, policy] : choice.policies.filter((one) => one !== policy) })}
              />
              {policy}
            </label>
          ))}
        </fieldset>
        <div class="actions">
          <button type="submit" class="main" disabled={running}>
            {running ? "Playing…" : "Play"}
          </button>
          <span class="fine">Several values with commas between them are compared, the first with the others.</span>
        </div>
        {running && <Progress share={null} label="The simulation runs" />}
        <Problem>{problem}</Problem>
      </form>
      {said ? <Outcome said={said} /> : <div class="panel"><Empty title="Nothing was played yet">Say what to compare, and press Play. It takes seconds.</Empty></div>}
    </>
  );
}

function about(input: Input): string {
  if (!input.requests) return "No request was recorded yet, so they are drawn: independent callers, models by popularity.";
  const from = input.source === "recording" ? "from the recording of this gateway" : "that this gateway remembers";
  return `${plural(input.requests, "request")} ${input.seconds < 1 ? "within a second" : `over ${seconds(input.seconds)}`} ${from}. For more, set server.record_activity.`;
}

function Field({ name, value, hint, onChange }: { name: string; value: string; hint: string; onChange: (value: string) => void }) {
  return (
    <label class="field">
      {name}
      <input type="text" inputMode="decimal" value={value} placeholder={hint} onInput={(event) => onChange(event.currentTarget.value)} />
    </label>
  );
}

/** What was typed, as the API takes it. Throws where it is no number. */
function orderOf(choice: Choice): Record<string, unknown> {
  const numbers = (text: string, name: string) =>
    text.split(/[\s,]+/).filter(Boolean).map((word) => {
      if (!/^\d+(\.\d+)?$/.test(word)) throw new Error(`${name}: ${word} is not a number.`);
      return Number(word);
    });
  const lists = {
    gpus: numbers(choice.gpus, "Number of GPUs"),
    gpu_mib: numbers(choice.gpu_mib, "Memory of each GPU"),
    green_room_mib: numbers(choice.green_room_mib, "Green room"),
    policy: choice.policies,
  };
  const rate = numbers(choice.rate, "Requests per second")[0];
  return { ...Object.fromEntries(Object.entries(lists).filter(([, values]) => values.length)), ...(rate !== undefined && { rate }) };
}

function Outcome({ said }: { said: Simulated }) {
  return (
    <>
      <section class="panel simulated" aria-label="Bottom line" role="status">
        {said.bottom_line.map((sentence) => (
          <p key={sentence}>{sentence}</p>
        ))}
      </section>
      <div class="graphs">
        <Bars title="Wait, 95 of 100" about="95 of 100 requests wait at most this long" cases={said.cases} value={(one) => one.waits.p95_s} format={seconds} />
        <Bars title="Mean wait" about="from arrival to the moment the model begins" cases={said.cases} value={(one) => one.waits.mean_s} format={seconds} />
        <Bars title="Not there" about="mean wait because the model was loading or had no room" cases={said.cases} value={(one) => one.delays.not_there_s} format={seconds} />
        <Bars title="Full" about="mean wait because the model answered as many as it can" cases={said.cases} value={(one) => one.delays.full_s} format={seconds} />
        <Bars title="Swaps" about="loads and wakes" cases={said.cases} value={(one) => one.swaps} format={count} />
        <Bars title="Busy" about="share of the GPUs' memory and time that served requests" cases={said.cases} value={(one) => one.busy} format={percent} />
        <Bars title="Lost" about="requests that were refused" cases={said.cases} value={(one) => one.lost} format={count} />
      </div>
      <details class="panel simulated">
        <summary>What was assumed</summary>
        <ul>
          {said.assumed.map((sentence) => (
            <li key={sentence}>{sentence}</li>
          ))}
        </ul>
      </details>
    </>
  );
}

/** One bar for each case. */
function Bars({ title, about, cases, value, format }: { title: string; about: string; cases: Case[]; value: (one: Case) => number; format: (value: number) => string }) {
  const most = Math.max(...cases.map(value), 1e-9);
  return (
    <section class="panel graph" aria-label={title}>
      <h2>{title}</h2>
      <p class="fine">{about}</p>
      <dl class="bars">
        {cases.map((one, at) => (
          <div key={at}>
            <dt title={nameOf(one)}>{nameOf(one)}</dt>
            <dd>
              <i class={`c${at % 8}`} style={{ width: `${(100 * value(one)) / most}%` }} />
              <span>{format(value(one))}</span>
            </dd>
          </div>
        ))}
      </dl>
    </section>
  );
}

function nameOf(one: Case): string {
  const parts = [one.policy];
  if (one.gpus !== null) parts.push(plural(one.gpus, "GPU"));
  if (one.gpu_mib !== null) parts.push(`of ${mib(one.gpu_mib)}`);
  if (one.green_room_mib !== null) parts.push(one.green_room_mib ? `green room ${mib(one.green_room_mib)}` : "no green room");
  return parts.join(", ");
}
