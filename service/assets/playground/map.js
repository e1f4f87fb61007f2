/** One picture as the encoder sees it: pixels, patch grid, heat-map, and the tokens that are marked on it. */

import { paint } from "./colours.js";
import { patchSide } from "./explain.js";

const MIN_LINE_GAP = 4; // CSS pixels between lines, below which they would hide the picture
const MIN_PATCH = 2; // CSS pixels of a patch's side; a longer picture scrolls in its frame
const PREVIEW_SIDE = 1600;

export class TokenMap {
  #element;
  #geometry = null;
  #token = 0;
  #hasGrid = true;

  /** `onMove` and `onHold` get the token that is pointed at or held; `onRelease` is Escape. */
  constructor(element, { onMove, onHold, onRelease }) {
    this.#element = element;
    element.addEventListener("pointermove", (event) => this.#go(this.#tokenAt(event), onMove));
    element.addEventListener("click", (event) => this.#go(this.#tokenAt(event), onHold));
    element.addEventListener("focus", () => this.#go(this.#token, onMove));
    element.addEventListener("keydown", (event) => this.#onKey(event, { onMove, onHold, onRelease }));
    new ResizeObserver(() => this.#drawLines()).observe(element);
  }

  /** Of tokens. */
  get rows() {
    return this.#geometry.grid_thw[1] / 2;
  }

  /** Of tokens. */
  get columns() {
    return this.#geometry.grid_thw[2] / 2;
  }

  /** The picture alone, before anything is known of its tokens. */
  preview(bitmap) {
    this.#geometry = null;
    this.#canvas("heat").width = 0;
    const scale = Math.min(1, PREVIEW_SIDE / Math.max(bitmap.width, bitmap.height));
    const encoded = [bitmap.width, bitmap.height].map((side) => Math.max(1, Math.round(side * scale)));
    this.#resize(encoded, encoded, bitmap);
  }

  /** The picture as it is encoded; `bitmap` is null where the browser cannot draw it. */
  show(bitmap, geometry) {
    this.#geometry = geometry;
    this.#token = 0;
    this.#element.style.setProperty("--narrowest", `${geometry.grid_thw[2] * MIN_PATCH}px`);
    this.#resize(geometry.padded_size, geometry.encoded_size, bitmap);
    const heat = this.#canvas("heat");
    [heat.width, heat.height] = [this.columns, this.rows];
  }

  /** Colour every token by its similarity. */
  heat(similarities, { low, high }) {
    paint(this.#canvas("heat"), similarities, low, high);
  }

  /** Outline a token as the `reference` or the `probe`; null takes the outline away. */
  mark(kind, token) {
    const marker = this.#element.querySelector(`.marker.${kind}`);
    marker.hidden = token === null;
    if (token === null) return;
    Object.assign(marker.style, {
      left: `${((token % this.columns) / this.columns) * 100}%`,
      top: `${(Math.floor(token / this.columns) / this.rows) * 100}%`,
      width: `${100 / this.columns}%`,
      height: `${100 / this.rows}%`,
    });
  }

  set hasGrid(value) {
    this.#hasGrid = value;
    this.#drawLines();
  }

  #canvas(name) {
    return this.#element.querySelector(`canvas.${name}`);
  }

  #resize([width, height], [encodedWidth, encodedHeight], bitmap) {
    const pixels = this.#canvas("pixels");
    [pixels.width, pixels.height] = [width, height];
    this.#element.style.setProperty("--ratio", width / height);
    if (bitmap) {
      const context = pixels.getContext("2d");
      context.imageSmoothingQuality = "high";
      context.drawImage(bitmap, 0, 0, encodedWidth, encodedHeight);
    }
    this.#drawLines();
  }

  #go(token, then) {
    if (!this.#geometry) return;
    this.#token = token;
    then(token);
  }

  #tokenAt({ clientX, clientY }) {
    if (!this.#geometry) return 0;
    const { left, top, width, height } = this.#element.getBoundingClientRect();
    const place = (offset, length, cells) => Math.min(cells - 1, Math.max(0, Math.floor((offset / length) * cells)));
    return place(clientY - top, height, this.rows) * this.columns + place(clientX - left, width, this.columns);
  }

  #onKey(event, { onMove, onHold, onRelease }) {
    if (!this.#geometry || event.ctrlKey || event.metaKey || event.altKey) return;
    const column = this.#token % this.columns;
    const steps = {
      ArrowLeft: column > 0 ? -1 : 0,
      ArrowRight: column < this.columns - 1 ? 1 : 0,
      ArrowUp: this.#token >= this.columns ? -this.columns : 0,
      ArrowDown: this.#token < this.columns * (this.rows - 1) ? this.columns : 0,
      Home: -column,
      End: this.columns - 1 - column,
    };
    if (event.key in steps) this.#go(this.#token + steps[event.key], onMove);
    else if (event.key === "Enter" || event.key === " ") onHold(this.#token);
    else if (event.key === "Escape") onRelease();
    else return;
    event.preventDefault();
    this.#element.querySelector(".marker:not([hidden])")?.scrollIntoView({ block: "nearest", inline: "nearest" });
  }

  /** Lines between patches and stronger ones between tokens, at the screen's own resolution; padding is hatched. */
  #drawLines() {
    const canvas = this.#canvas("lines");
    const { clientWidth, clientHeight } = this.#element;
    const ratio = devicePixelRatio;
    [canvas.width, canvas.height] = [clientWidth * ratio, clientHeight * ratio];
    if (!this.#geometry) return;
    const context = canvas.getContext("2d");
    const scale = canvas.width / this.#geometry.padded_size[0];
    hatchPadding(context, this.#geometry, scale);
    if (!this.#hasGrid) return;
    const patch = patchSide(this.#geometry) * scale;
    if (patch >= MIN_LINE_GAP * ratio) rule(context, patch, "rgb(255 255 255 / 0.35)", "rgb(0 0 0 / 0.2)");
    if (2 * patch >= MIN_LINE_GAP * ratio) rule(context, 2 * patch, "rgb(255 255 255 / 0.8)", "rgb(0 0 0 / 0.6)");
  }
}

/** Lines every `gap` pixels, each of a light and a dark one side by side, to be seen on any picture. */
function rule(context, gap, light, dark) {
  const { width, height } = context.canvas;
  [light, dark].forEach((style, shift) => {
    context.fillStyle = style;
    for (let x = gap; x < width - 1; x += gap) context.fillRect(Math.round(x) - shift, 0, 1, height);
    for (let y = gap; y < height - 1; y += gap) context.fillRect(0, Math.round(y) - shift, width, 1);
  });
}

function hatchPadding(context, { encoded_size: [encodedWidth, encodedHeight] }, scale) {
  const { width, height } = context.canvas;
  const [right, bottom] = [encodedWidth * scale, encodedHeight * scale];
  context.save();
  context.beginPath();
  context.rect(right, 0, width - right, height);
  context.rect(0, bottom, right, height - bottom);
  context.clip();
  context.fillStyle = "rgb(0 0 0 / 0.55)";
  context.fillRect(0, 0, width, height);
  context.strokeStyle = "rgb(255 255 255 / 0.55)";
  context.lineWidth = devicePixelRatio;
  context.beginPath();
  for (let x = -height; x < width; x += 7 * devicePixelRatio) {
    context.moveTo(x, height);
    context.lineTo(x + height, 0);
  }
  context.stroke();
  context.restore();
}
