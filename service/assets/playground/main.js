/** The page: its controls, how files come in, and the two panels that show them. */

import { describe } from "./api.js";
import { Comparison } from "./comparison.js";
import { count } from "./format.js";
import { Panel } from "./panel.js";
import { curl, python } from "./snippets.js";

const part = (id) => document.getElementById(id);
const ignore = () => {}; // what is shown already
const announce = (text) => (part("announcer").textContent = text);

const comparison = new Comparison(announce);
const options = {
  announce,
  comparison,
  capacity: connect,
  key: () => part("key").value,
  oversize: () => part("policy").value,
  onFiles: openFiles,
  onChange: showSnippets,
};
const panels = [
  new Panel("A", "Drop a picture here, paste one, or choose a file: JPEG, PNG, GIF, WebP, BMP, TIFF or AVIF.", options),
  new Panel("B", "A second picture, to compare it with the first.", options),
];

/** Say what is served, offer the policies that are allowed, and give the capacity in force, which a reload may change. */
async function connect() {
  try {
    const { model, capacity } = await describe(part("key").value);
    const tiers = capacity.tiers.map(({ patches }) => count(patches)).join(" · ");
    part("served").textContent = `${model.id}, ${model.dtype}, ${count(model.dimensions)} numbers a token; tiers of ${tiers} patches`;
    offerPolicies(capacity);
    return capacity;
  } catch (error) {
    part("served").textContent = error.status === 401 ? "This service needs an API key: type it below." : error.message;
    throw error;
  }
}

function offerPolicies({ policy, allow_override: allowed }) {
  const [asSet, ...others] = part("policy").options;
  asSet.textContent = `${policy === "refuse" ? "refused" : "downscaled"} (as the service is set)`;
  others.forEach((option) => {
    option.disabled = option.value !== policy && allowed !== "any" && !(allowed === "stricter" && option.value === "refuse");
    option.textContent = `${option.value === "refuse" ? "refused" : "downscaled"}${option.disabled ? ", not allowed here" : ""}`;
  });
}

/** Show one file or two: the first where it was dropped, or else where there is room. */
function openFiles(files, wanted = null) {
  const first = wanted ?? panels.find((panel) => !panel.hasPicture) ?? panels.at(-1);
  const second = panels.find((panel) => panel !== first);
  const [one, two, ...rest] = files;
  first.open(one);
  if (two) second.open(two);
  if (rest.length) announce(`Only two pictures can be shown: ${rest.length} more were left out`);
}

function showSnippets() {
  const requests = panels.map(({ request }) => request).filter(Boolean);
  const where = { base: new URL(".", document.baseURI).href, hasKey: part("key").value !== "" };
  part("code").hidden = requests.length === 0;
  part("curl").textContent = requests.length ? curl(requests, where) : "";
  part("python").textContent = requests.length ? python(requests, where) : "";
}

async function copy(button) {
  const code = button.closest("figure").querySelector("pre");
  getSelection().selectAllChildren(code);
  try {
    await navigator.clipboard.writeText(code.textContent);
    announce("Copied");
    button.textContent = "Copied";
  } catch {
    announce("Selected: copy it with your keyboard"); // no clipboard outside https and localhost
    button.textContent = "Selected";
  }
  setTimeout(() => (button.textContent = "Copy"), 2000);
}

function listenToControls() {
  part("controls").addEventListener("submit", (event) => event.preventDefault());
  part("key").addEventListener("change", async () => {
    showSnippets();
    await connect().catch(ignore);
    panels.filter((panel) => panel.hasPicture && !panel.isEncoded).forEach((panel) => panel.encode());
  });
  part("policy").addEventListener("change", () => {
    panels.filter((panel) => panel.hasPicture).forEach((panel) => panel.encode());
  });
  part("grid").addEventListener("change", ({ target }) => {
    panels.forEach(({ map }) => (map.hasGrid = target.checked));
  });
  const setStrength = () => document.body.style.setProperty("--heat", part("strength").value / 100);
  part("strength").addEventListener("input", setStrength);
  setStrength();
  document.querySelectorAll(".copy").forEach((button) => button.addEventListener("click", () => copy(button)));
}

function listenToFiles() {
  document.addEventListener("dragover", (event) => {
    event.preventDefault();
    document.body.classList.add("dragging");
  });
  document.addEventListener("dragleave", ({ relatedTarget }) => {
    if (relatedTarget === null) document.body.classList.remove("dragging");
  });
  document.addEventListener("drop", (event) => {
    event.preventDefault();
    document.body.classList.remove("dragging");
    const files = [...event.dataTransfer.files];
    if (files.length) openFiles(files, panels.find((panel) => panel.contains(event.target)));
    else announce("What was dropped is no file");
  });
  document.addEventListener("paste", ({ clipboardData, target }) => {
    const files = [...clipboardData.files];
    if (files.length) openFiles(files, panels.find((panel) => panel.contains(target)));
  });
}

listenToControls();
listenToFiles();
connect().catch(ignore);
