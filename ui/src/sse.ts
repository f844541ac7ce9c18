// Reads server-sent events from an answer of `fetch`: unlike EventSource it can send a key.

export interface ServerEvent {
  /** "message" if the server named none. */
  kind: string;
  id: string | null;
  data: string;
}

/** Calls `take` for each event until the stream ends. `beat` is called for every piece, comments included. */
export async function readEvents(answer: Response, take: (event: ServerEvent) => void, beat?: () => void): Promise<void> {
  const reader = answer.body!.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    beat?.();
    // A piece may end between the two characters of a line's end.
    const text = rest + value;
    const held = text.endsWith("\r") ? "\r" : "";
    const parts = text.slice(0, text.length - held.length).replace(/\r\n?/g, "\n").split("\n\n");
    rest = parts.pop()! + held;
    for (const part of parts) {
      const event = parse(part);
      if (event) take(event);
    }
  }
}

function parse(part: string): ServerEvent | null {
  let kind = "message";
  let id: string | null = null;
  const data: string[] = [];
  for (const line of part.split("\n")) {
    const colon = line.indexOf(":");
    if (colon <= 0) continue;
    const name = line.slice(0, colon);
    const value = line.slice(colon + 1).replace(/^ /, "");
    if (name === "event") kind = value;
    else if (name === "id") id = value;
    else if (name === "data") data.push(value);
  }
  return data.length ? { kind, id, data: data.join("\n") } : null;
}
