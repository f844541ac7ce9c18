// Bundles the dashboard: `node build.mjs FOLDER`. The same input gives the same bytes on every machine.
import { copyFileSync, existsSync, mkdirSync, readFileSync, readdirSync, writeFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { build } from "esbuild";

const here = dirname(fileURLToPath(import.meta.url));
const target = process.argv[2] ?? join(here, "../src/greenroom/api/ui/assets");

mkdirSync(target, { recursive: true });
const { metafile } = await build({
  absWorkingDir: here,
  entryPoints: { app: "src/main.tsx" },
  outdir: target,
  bundle: true,
  minify: true,
  format: "esm",
  target: "es2022",
  charset: "utf8",
  jsx: "automatic",
  jsxImportSource: "preact",
  // They are in licences.txt, whole.
  legalComments: "none",
  metafile: true,
  logLevel: "warning",
});
for (const name of ["index.html", "icon.svg"]) copyFileSync(join(here, "static", name), join(target, name));
writeFileSync(join(target, "licences.txt"), licences(Object.keys(metafile.inputs)));

/** The licence of every package whose code is in the bundle. */
function licences(inputs) {
  const names = new Set();
  for (const input of inputs) {
    const found = /(?:^|\/)node_modules\/((?:@[^/]+\/)?[^/]+)\//.exec(input);
    if (found) names.add(found[1]);
  }
  const parts = [...names].sort().map((name) => {
    const folder = join(here, "node_modules", name);
    const about = JSON.parse(readFileSync(join(folder, "package.json"), "utf8"));
    const file = readdirSync(folder).sort().find((one) => /^licen[cs]e/i.test(one));
    if (!file || !existsSync(join(folder, file))) throw new Error(`${name} has no file with its licence`);
    const words = readFileSync(join(folder, file), "utf8").trim();
    return `${name} ${about.version} (${about.license})\n\n${words}\n`;
  });
  const head = "The dashboard (app.js, app.css) holds code of these packages:\n";
  return [head, ...parts].join(`\n${"-".repeat(80)}\n\n`);
}
