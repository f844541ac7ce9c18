// Every page there is, in the order of the navigation.
import type { ComponentType } from "preact";
import { Config } from "./pages/config";
import { Decisions } from "./pages/decisions";
import { Leases } from "./pages/leases";
import { Metrics } from "./pages/metrics";
import { Playground } from "./pages/playground/playground";
import { Queue } from "./pages/queue";
import { Requests } from "./pages/requests";
import { Simulate } from "./pages/simulate";
import { Stage } from "./pages/stage";
import { Tasks } from "./pages/tasks";
import { Tenants } from "./pages/tenants";
import { TimelinePage } from "./pages/timeline";
import { Versions } from "./pages/versions";

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
  { path: "timeline", title: "Timeline", group: "Why", view: TimelinePage },
  { path: "decisions", title: "Decisions", group: "Why", view: Decisions },
  { path: "simulate", title: "Simulate", group: "Why", view: Simulate },
  { path: "playground", title: "Playground", group: "Models", view: Playground },
  { path: "tasks", title: "Tasks and downloads", group: "Models", view: Tasks },
  { path: "versions", title: "Versions", group: "Models", view: Versions },
  { path: "tenants", title: "Tenants and limits", group: "Gateway", view: Tenants },
  { path: "config", title: "Config", group: "Gateway", view: Config },
  { path: "metrics", title: "Metrics", group: "Gateway", view: Metrics },
];
