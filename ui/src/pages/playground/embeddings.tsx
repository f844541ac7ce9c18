// How alike texts are, by a model's embeddings.
import { useState } from "preact/hooks";
import { post } from "../../api";
import { plural } from "../../format";
import { Problem } from "../../parts/bits";
import type { Model } from "../../types";
import { Go, useChoice, useJob } from "./media";
import { ModelSelect } from "./models";

const LINES_MAX = 12;
const FIRST = "The cat sat on the mat.\nA kitten lay on the rug.\nShares fell sharply on Monday.";

interface Likeness {
  texts: string[];
  /** Cosine of the angle between each two: 1 is the same direction. */
  alike: number[][];
  dimensions: number;
}

export function Embeddings(props: { able: Model[]; wanted: string }) {
  const [model, choose] = useChoice(props);
  const [text, setText] = useState(FIRST);
  const lines = text.split("\n").filter((line) => line.trim()).slice(0, LINES_MAX);
  const job = useJob<Likeness>();
  const compare = (event: Event) => {
    event.preventDefault();
    job.run(async (signal) => {
      const made = await post<{ data: { index: number; embedding: number[] }[] }>("/v1/embeddings", { model, input: lines }, { signal });
      const vectors = [...made.data].sort((one, other) => one.index - other.index).map((one) => one.embedding);
      return { texts: lines, alike: vectors.map((one) => vectors.map((other) => cosine(one, other))), dimensions: vectors[0]?.length ?? 0 };
    });
  };
  return (
    <form class="panel stack" onSubmit={compare}>
      <ModelSelect label="Model" able={props.able} value={model} onChange={choose} />
      <label class="field">
        Texts, one on each line, at most {LINES_MAX}
        <textarea rows={5} value={text} onInput={(event) => setText(event.currentTarget.value)} />
      </label>
      <Go job={job} name="Compare" disabled={!model || lines.length < 2} />
      <Problem>{job.error}</Problem>
      {job.result && <Grid likeness={job.result} />}
    </form>
  );
}

function Grid({ likeness: { texts, alike, dimensions } }: { likeness: Likeness }) {
  return (
    <div class="scroll" tabIndex={0} role="region" aria-label="Similarity">
      <table class="likeness">
        <caption class="fine">Cosine similarity of each two texts, in {plural(dimensions, "dimension")}</caption>
        <thead>
          <tr>
            <td />
            {texts.map((_, at) => (
              <th key={at} scope="col">
                {at + 1}
              </th>
            ))}
          </tr>
        </thead>
        <tbody>
          {texts.map((text, row) => (
            <tr key={row}>
              <th scope="row">
                {row + 1}. {text}
              </th>
              {alike[row]!.map((value, column) => (
                <td key={column} style={{ backgroundColor: `color-mix(in srgb, var(--accent) ${Math.round(Math.max(0, value) * 45)}%, transparent)` }}>
                  {value.toFixed(2)}
                </td>
              ))}
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

function cosine(one: number[], other: number[]): number {
  let [dot, left, right] = [0, 0, 0];
  for (let at = 0; at < one.length; at += 1) {
    const [a, b] = [one[at]!, other[at] ?? 0];
    dot += a * b;
    left += a * a;
    right += b * b;
  }
  return dot / (Math.sqrt(left * right) || 1);
}
