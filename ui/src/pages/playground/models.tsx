// Which models can be asked for what.
import type { Model } from "../../types";

export type Ability = "chat" | "images" | "transcription" | "speech" | "embeddings";

/** Models that say they can, and those of which nothing is known. */
export function ableTo(models: Model[], ability: Ability): Model[] {
  const able = models.filter((model) => model.capabilities?.includes(ability));
  const unknown = models.filter((model) => model.capabilities === null);
  return [...able, ...unknown];
}

const TIER_WORDS = { ready: "ready", asleep: "asleep", cold: "at home" } as const;

interface Props {
  label: string;
  able: Model[];
  value: string;
  onChange: (model: string) => void;
}

export function ModelSelect({ label, able, value, onChange }: Props) {
  const isGone = value !== "" && !able.some((model) => model.id === value);
  return (
    <select aria-label={label} value={value} onChange={(event) => onChange(event.currentTarget.value)}>
      {isGone && <option value={value}>{value}</option>}
      {able.map((model) => (
        <option key={model.id} value={model.id}>
          {model.id} ({TIER_WORDS[model.tier]})
        </option>
      ))}
    </select>
  );
}
