// Every page there is, in the order of the navigation.
import type { ComponentType } from "preact";
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
];
