import "uplot/dist/uPlot.min.css";
import "./style.css";
import { render } from "preact";
import { start } from "./live";
import { Shell } from "./shell";

start();
render(<Shell />, document.getElementById("app")!);
