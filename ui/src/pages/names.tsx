// Names that lead to where more is told about them.
import { models } from "../live";
import { toneOf } from "../parts/memory";
import { href } from "../route";

/** A model with its colour, leading to its place on the stage. */
export function ModelName({ id }: { id: string }) {
  return (
    <a class="model-name" href={href("stage", { model: id })} onClick={(event) => event.stopPropagation()}>
      <i class={`swatch ${toneOf(id)}`} aria-hidden="true" />
      <span>{id}</span>
    </a>
  );
}

/** Only one model, by name; empty for all. */
export function ModelFilter({ value, onChange }: { value: string; onChange: (id: string) => void }) {
  const ids = models.value.map((model) => model.id);
  return (
    <select aria-label="Model" value={value} onChange={(event) => onChange(event.currentTarget.value)}>
      <option value="">All models</option>
      {value && !ids.includes(value) && <option value={value}>{value}</option>}
      {ids.map((id) => (
        <option key={id} value={id}>
          {id}
        </option>
      ))}
    </select>
  );
}
