// Which page is shown: the part of the address after #, such as #/decisions?model=qwen.
import { signal } from "@preact/signals";

export interface Place {
  page: string;
  params: URLSearchParams;
}

export const place = signal<Place>(read());

function read(): Place {
  const [page = "", query = ""] = location.hash.replace(/^#\/?/, "").split("?", 2);
  return { page: page || "stage", params: new URLSearchParams(query) };
}

addEventListener("hashchange", () => {
  place.value = read();
});

export function href(page: string, params: Record<string, string> = {}): string {
  const query = new URLSearchParams(params).toString();
  return `#/${page}${query && `?${query}`}`;
}

export function go(page: string, params: Record<string, string> = {}): void {
  location.hash = href(page, params);
}

/** Change the parameters of this page without a new entry in the history. */
export function setParams(params: Record<string, string>): void {
  history.replaceState(null, "", href(place.value.page, params));
  place.value = read();
}
