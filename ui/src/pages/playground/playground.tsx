// Try the models: chat, pictures, sound, embeddings.
import "./playground.css";
import type { ComponentType } from "preact";
import { models } from "../../live";
import { Empty, PageHead } from "../../parts/bits";
import { href, place } from "../../route";
import type { Model } from "../../types";
import { Chat } from "./chat";
import { Embeddings } from "./embeddings";
import { Images, Speech, Transcription } from "./media";
import { ableTo, type Ability } from "./models";

interface Kind {
  ability: Ability;
  title: string;
  view: ComponentType<{ able: Model[]; wanted: string }>;
  /** What a model of this kind looks like in a configuration. */
  example: string;
}

const KINDS: Kind[] = [
  { ability: "chat", title: "Chat", view: Chat, example: "greenroom pull Qwen/Qwen3-0.6B-GGUF" },
  { ability: "images", title: "Pictures", view: Images, example: "models: {flux: {engine: diffusers, path: /srv/models/flux}}" },
  { ability: "transcription", title: "Transcription", view: Transcription, example: "models: {ears: {engine: whisper, path: /srv/models/whisper}}" },
  { ability: "speech", title: "Speech", view: Speech, example: "models: {voice: {cmd: my-speaker --port ${PORT}, abilities: [speech]}}" },
  { ability: "embeddings", title: "Embeddings", view: Embeddings, example: "models: {embed: {path: /srv/models/nomic.gguf, embedding: true}}" },
];

export function Playground() {
  const { params } = place.value;
  const wanted = params.get("model") ?? "";
  const kind = KINDS.find((one) => one.ability === params.get("kind")) ?? KINDS[0]!;
  const able = ableTo(models.value, kind.ability);
  const View = kind.view;
  return (
    <>
      <PageHead title="Playground" about="Ask the models through the gateway, as your programs do." />
      <nav class="tabs" aria-label="Kinds of requests">
        {KINDS.map((one) => (
          <a key={one.ability} href={href("playground", { kind: one.ability })} aria-current={one === kind ? "page" : undefined}>
            {one.title}
          </a>
        ))}
      </nav>
      {able.length ? (
        <View key={kind.ability} able={able} wanted={wanted} />
      ) : (
        <div class="panel">
          <Empty title={`No model here has the ability “${kind.ability}”`} command={kind.example}>
            Add one to the configuration, and reload it:
          </Empty>
        </div>
      )}
    </>
  );
}
