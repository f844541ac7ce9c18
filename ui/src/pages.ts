// Every page there is, in the order of the navigation.
import type { ComponentType } from "preact";
import { Decisions } from "./pages/decisions";
import { Leases } from "./pages/leases";
import { Queue } from "./pages/queue";
import { Requests } from "./pages/requests";
import { Stage } from "./pages/stage";

export interface Page {
  /** Its address: #/path */
  path: string;
  title: string;
  group: "Now" | "Why" | "Models" | "Gateway";
  view: ComponentType;
}

export const PAGES: Page[] = [
  { path: "stage", title: "Stage", group: "Now", view: Stage },
  { path: "queue", title: "Queue", group: "Now", view: Queue },
  { path: "requests", title: "Requests", group: "Now", view: Requests },
  { path: "leases", title: "Leases", group: "Now", view: Leases },
  { path: "decisions", title: "Decisions", group: "Why", view: Decisions },
];
