/** One of the page's two pictures: its file, the request for it, and what came back. */

import { CallError, encode } from "./api.js";
import { changes, facts, patchSide } from "./explain.js";
import { count, milliseconds, size } from "./format.js";
import { TokenMap } from "./map.js";
import { readHeader } from "./safetensors.js";

const SAMPLE = "playground/photograph.jpg";

export class Panel {
  #root;
  #options;
  #file = null;
  #bitmap = null;
  #abort = new AbortController();

  /** The request that was made last, for `snippets`; null where there is no picture. */
  request = null;
  /** Whether its tokens are shown. */
  isEncoded = false;

  /**
   * `options`: `key()` and `oversize()` are those to use, `capacity()` promises the one in force; `announce(text)` is for
   * screen readers; `onFiles(files, panel)` and `onChange()` are called when files are chosen and when something else is
   * shown; `comparison` is the page's.
   */
  constructor(name, emptyText, options) {
    this.name = name;
    this.#options = options;
    this.#root = document.querySelector("#panel").content.firstElementChild.cloneNode(true);
    this.#find("h2").textContent = `Image ${name}`;
    this.#find("h2").id = `panel-${name}`;
    this.#root.setAttribute("aria-labelledby", `panel-${name}`);
    this.#find(".map").setAttribute("aria-label", `Image ${name}`);
    this.#find(".empty").textContent = emptyText;
    this.map = new TokenMap(this.#find(".map"), {
      onMove: (token) => options.comparison.move(name, token),
      onHold: (token) => options.comparison.hold(name, token),
      onRelease: () => options.comparison.release(),
    });
    this.#listen();
    document.querySelector("#panels").append(this.#root);
  }

  get hasPicture() {
    return this.#file !== null;
  }

  contains(element) {
    return this.#root.contains(element);
  }

  /** Show this file's picture and encode it; `download` is where others get the file, if anywhere. */
  async open(file, download = null) {
    this.clear();
    this.#file = file;
    this.request = { fileName: file.name, oversize: "", download };
    await this.encode();
  }

  /** Ask the service, again if need be. */
  async encode() {
    this.#reset();
    const { signal } = this.#abort;
    const oversize = this.#options.oversize();
    this.request = { ...this.request, oversize };
    this.#show({ progress: true, remove: true });
    const clock = this.#startClock();
    try {
      const bitmap = await createImageBitmap(this.#file).catch(() => null); // it may read fewer formats than the service
      if (signal.aborted) return;
      this.#bitmap = bitmap;
      if (bitmap) this.map.preview(bitmap);
      this.#show({ picture: bitmap !== null, progress: true, remove: true });
      const answer = await encode(this.#file, { key: this.#options.key(), oversize, signal });
      const capacity = await this.#options.capacity();
      if (!signal.aborted) await this.#showAnswer(answer, capacity);
    } catch (error) {
      if (!signal.aborted) this.#showError(error);
    } finally {
      clearInterval(clock);
      this.#options.onChange();
    }
  }

  /** Nothing is shown any more, and nothing awaited. */
  clear() {
    this.#reset();
    this.#file = this.request = null;
    this.#show({ empty: true });
    this.#options.onChange();
  }

  #reset() {
    this.#abort.abort();
    this.#abort = new AbortController();
    this.isEncoded = false;
    this.#bitmap?.close();
    this.#bitmap = null;
    this.map.mark("reference", null);
    this.map.mark("probe", null);
    for (const part of [".changes", ".facts", ".stages tbody", ".error", "figcaption"]) this.#find(part).replaceChildren();
    this.#options.comparison.remove(this.name);
  }

  #find(selector) {
    return this.#root.querySelector(selector);
  }

  #listen() {
    const input = this.#find(".file");
    input.setAttribute("aria-label", `Choose a file for image ${this.name}`);
    input.addEventListener("change", () => {
      if (input.files.length) this.#options.onFiles([...input.files], this);
      input.value = ""; // so that the same file can be chosen again
    });
    this.#onClick(this.#find(".sample"), () => this.#openSample());
    this.#onClick(this.#find(".remove"), () => this.clear());
    this.#onClick(this.#find(".cancel"), () => {
      this.#abort.abort();
      this.#showError(new CallError("Cancelled here, before there was an answer."));
    });
  }

  /** A click takes its button away, so the focus goes to the heading. */
  #onClick(button, action) {
    button.addEventListener("click", () => {
      this.#find("h2").focus();
      action();
    });
  }

  async #openSample() {
    const url = new URL(SAMPLE, document.baseURI);
    try {
      const blob = await (await fetch(url)).blob();
      await this.open(new File([blob], "photograph.jpg", { type: blob.type }), url.href);
    } catch (error) {
      this.#showError(error, () => this.#openSample());
    }
  }

  #show({ empty = false, picture = false, progress = false, stages = false, remove = false }) {
    Object.entries({ empty, picture, progress, stages, remove }).forEach(([part, isShown]) => {
      this.#find(`.${part}`).hidden = !isShown;
    });
    this.#find(".sample").hidden = remove;
  }

  #startClock() {
    const started = performance.now();
    const text = this.#find(".progress span");
    const tick = () => (text.textContent = `Encoding … ${Math.round((performance.now() - started) / 1000)} s`);
    tick();
    this.#options.announce(`Encoding image ${this.name}`);
    return setInterval(tick, 1000);
  }

  async #showAnswer({ body, elapsedMs, requestId, stages }, capacity) {
    const header = readHeader(body);
    const answer = { ...header, numBytes: body.byteLength, requestId };
    const { geometry } = header;
    this.isEncoded = true;
    this.#show({ picture: true, stages: true, remove: true });
    const isDrawn = [this.#bitmap?.width, this.#bitmap?.height].join() === geometry.original_size.join();
    this.map.show(isDrawn ? this.#bitmap : null, geometry);
    this.#find(".map").setAttribute("aria-label", `Image ${this.name}: ${count(geometry.num_tokens)} tokens of ${this.#file.name}`);
    this.#find("figcaption").textContent = caption(geometry, {
      isDrawn,
      isTurned: capacity.image.orientation === "apply",
    });
    this.#find(".changes").append(...changes(geometry, capacity).map(change));
    this.#find(".facts").append(...facts({ file: this.#file, answer, capacity }).map(definition));
    this.#find(".stages tbody").append(...stageRows(stages, elapsedMs));
    await this.#options.comparison.add(this.name, this.map, body, header);
    this.#options.announce(`Image ${this.name} is encoded: ${count(geometry.num_tokens)} tokens`);
  }

  #showError(error, retry = () => this.encode()) {
    this.#show({ picture: this.#bitmap !== null, remove: true });
    const terms = { status: error.status, code: error.code, param: error.param, "request id": error.requestId };
    const list = element("dl");
    list.append(...Object.entries(terms).filter(([, value]) => value).map(definition));
    const again = element("button", "Try again");
    again.type = "button";
    this.#onClick(again, retry);
    const wait = error.retryAfterS ? [element("p", `The service asks to wait for ${error.retryAfterS} s.`)] : [];
    this.#find(".error").replaceChildren(element("p", error.message), list, ...wait, again);
  }
}

/** What the picture shows; `isDrawn` is false where this browser reads the file in another way than the service, or not. */
function caption(geometry, { isDrawn, isTurned }) {
  const side = patchSide(geometry);
  return [
    isDrawn ? "" : "This browser cannot draw the file as the service reads it, so the grid stands alone.",
    isTurned ? "" : "The service does not turn pictures as their EXIF says; this browser does, if it draws them.",
    `${size(geometry.encoded_size)} as encoded. Strong lines: tokens of 2 × 2 patches; fine lines: patches of`,
    `${side} × ${side} px; hatched: padding.`,
  ].join(" ");
}

function stageRows(stages, elapsedMs) {
  const total = stages.reduce((sum, { ms }) => sum + ms, 0);
  const longest = Math.max(...stages.map(({ ms }) => ms));
  return [
    ...stages.map(({ name, ms }) => stageRow(name, ms, ms / longest)),
    stageRow("in the service", total),
    stageRow("seen from here", elapsedMs),
  ];
}

/** `share` is of the longest stage; sums have no bar. */
function stageRow(name, ms, share = null) {
  const row = element("tr");
  const heading = element("th", name);
  heading.scope = "row";
  const bar = element("td");
  if (share === null) row.className = "sum";
  else bar.append(element("div"));
  bar.style.setProperty("--share", share ?? 0);
  row.append(heading, element("td", milliseconds(ms)), bar);
  return row;
}

function change([what, howAndWhy]) {
  const item = element("li");
  item.append(element("strong", what), ` ${howAndWhy}`);
  return item;
}

function definition([term, description]) {
  const pair = element("div");
  pair.append(element("dt", term), element("dd", String(description)));
  return pair;
}

function element(name, text = "") {
  const made = document.createElement(name);
  made.textContent = text;
  return made;
}
