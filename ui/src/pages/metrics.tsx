// A dozen plots of the last hour, from what the gateway keeps in memory. For longer there is Prometheus.
import { count, mib, percent, seconds } from "../format";
import { useHistory, type History } from "../history";
import { deviceNames } from "../live";
import { Empty, PageHead, Problem, Readers } from "../parts/bits";
import { Plot, type Line } from "../parts/plot";
import "./history.css";

type Values = (number | null)[];

interface Graph {
  title: string;
  about: string;
  lines: Line[];
  values: Values[];
  format: (value: number) => string;
  max?: number;
}

const rate = (value: number) => `${value >= 100 ? count(Math.round(value)) : Number(value.toFixed(2))}/s`;
const whole = (value: number) => (Number.isInteger(value) ? count(value) : "");

export function Metrics() {
  return (
    <>
      <PageHead
        title="Metrics"
        about={
          <>
            The last hour, every ten seconds. For longer, let Prometheus scrape <code>/metrics</code>; <code>deploy/grafana.json</code> is a
            dashboard for it.
          </>
        }
      />
      <Readers>
        <Graphs />
      </Readers>
    </>
  );
}

function Graphs() {
  const { data, error } = useHistory();
  if (!data) return <Problem>{error}</Problem>;
  if (!data.at.length) return <Empty title="Nothing was measured yet">The first figures are here ten seconds after the start of the gateway.</Empty>;
  return (
    <>
      <Problem>{error}</Problem>
      <div class="graphs">
        {graphs(data).map((graph) => (
          <section key={graph.title} class="panel graph" aria-label={graph.title}>
            <header>
              <h2>{graph.title}</h2>
              <span class="now">{latest(graph)}</span>
            </header>
            <p class="fine">{graph.about}</p>
            <Plot label={`${graph.title}: ${latest(graph)}`} lines={graph.lines} data={[data.at, ...graph.values]} format={graph.format} max={graph.max} height={150} />
          </section>
        ))}
      </div>
    </>
  );
}

/** The last value of the first line. */
function latest(graph: Graph): string {
  const value = graph.values[0]?.at(-1);
  return value == null ? "–" : graph.format(value);
}

function graphs(data: History): Graph[] {
  const name = (device: string) => deviceNames.value.get(device) ?? device;
  const one = (title: string, about: string, values: Values, format: Graph["format"], colour = "--c1", max?: number): Graph => ({
    title,
    about,
    lines: [{ name: title, colour, filled: true }],
    values: [values],
    format,
    max,
  });
  const several = (title: string, about: string, parts: [string, Values][], format: Graph["format"], max?: number): Graph => ({
    title,
    about,
    lines: parts.map(([line]) => ({ name: line })),
    values: parts.map(([, values]) => values),
    format,
    max,
  });
  const perDevice = (values: Record<string, Values>) => Object.entries(values).map(([device, list]): [string, Values] => [name(device), list]);
  const found = [
    one("Requests", "answered per second", data.requests_per_s, rate),
    several("Failures", "per second: errors of the gateway or an engine (5xx), and refusals (4xx)", [["errors", data.errors_per_s], ["refused", data.refused_per_s]], rate),
    one("Waiting", "requests in the queue", data.queue, whole, "--c2", 1),
    one("Answering", "requests that are answered at the same time", data.in_flight, whole, "--c0", 1),
    one("Wait", "mean, from arrival to the moment the model begins", data.mean_wait_s, seconds, "--c2"),
    one("Answer", "mean, from arrival to the last byte", data.mean_total_s, seconds, "--c4"),
    several("Tokens", "per second: written, read, and found in a prefix cache", [["written", data.completion_tokens_per_s], ["read", data.prompt_tokens_per_s], ["cached", data.cached_tokens_per_s]], rate),
    one("Found ready", "share of requests whose model was ready and had room", data.hit_share, percent, "--c0", 1),
    one("Swaps", "loads and wakes per minute", data.swaps_per_min, (value) => String(Number(value.toFixed(1))), "--c3"),
    one("Time of a swap", "mean of loads and wakes", data.mean_swap_s, seconds, "--c3"),
    several("Models", "in each tier", [["ready", data.ready], ["asleep", data.asleep]], whole, 1),
    several("Memory", "in use on each device", perDevice(data.used_mib), mib),
    one("Green room", "host memory of models that are asleep", data.green_room_mib, mib, "--c2"),
    one("Connections", "open connections of callers, yours included", data.connections, whole, "--c7", 1),
  ];
  const used = perDevice(data.utilisation);
  if (used.length) found.splice(11, 0, several("GPU use", "share of the time that something ran on it", used, (value) => `${Math.round(value)} %`, 100));
  return found;
}
