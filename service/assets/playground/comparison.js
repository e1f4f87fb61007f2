/** Which token everything is compared with, and what comes out: heat-maps, their scale, and the values in words. */

import { paint } from "./colours.js";
import { similarity } from "./format.js";
import { Similarity } from "./similarity.js";

const NAMES = ["A", "B"];
const SILENCE_MS = 400; // a moving token is told to screen readers when it rests

export class Comparison {
  #embeddings = new Similarity();
  #maps = new Map(); // name -> TokenMap, of the pictures that are encoded
  #reference = null; // { name, token }
  #probe = null; // { name, token }, while the reference is held
  #isHeld = false;
  #similarities = null; // name -> Float32Array, to the reference
  #isComparing = false;
  #isStale = false;
  #announce;
  #announcement;

  constructor(announce) {
    this.#announce = announce;
    const legend = part("legend");
    paint(legend, Array.from({ length: legend.width }, (_, index) => index), 0, legend.width - 1);
  }

  /** A picture was encoded. Raises what the worker does: there may be no memory for its embeddings. */
  async add(name, map, body, header) {
    this.#maps.set(name, map);
    try {
      await this.#embeddings.add(name, body, header);
    } catch (error) {
      await this.remove(name);
      throw error;
    }
    if (!this.#maps.has(name)) return; // removed meanwhile
    this.#reference ??= { name, token: 0 };
    await this.#showPooled();
    await this.#compare();
  }

  /** A picture is gone. */
  async remove(name) {
    if (!this.#maps.delete(name)) return;
    const [left] = this.#maps.keys();
    if (this.#reference?.name === name) this.#reference = left ? { name: left, token: 0 } : null;
    this.#isHeld = false;
    this.#probe = this.#similarities = null;
    await this.#embeddings.remove(name);
    await this.#showPooled();
    await this.#compare();
  }

  /** A token is pointed at: it is the reference, or is compared with the one that is held. */
  move(name, token) {
    if (!this.#maps.has(name)) return;
    if (!this.#isHeld) {
      this.#reference = { name, token };
      this.#compare();
    } else if (this.#similarities?.[name]) {
      this.#probe = { name, token };
      this.#tell();
    }
  }

  /** Hold this token as the reference; the one that is held already is let go. */
  hold(name, token) {
    if (!this.#maps.has(name)) return;
    const isSame = this.#reference?.name === name && this.#reference.token === token;
    this.#isHeld = !(this.#isHeld && isSame);
    this.#reference = { name, token };
    this.#probe = null;
    this.#compare();
  }

  release() {
    this.#isHeld = false;
    this.#probe = null;
    this.#tell();
  }

  /** Compare with the reference; once more where something has changed meanwhile, but for the latest change only. */
  async #compare() {
    this.#isStale = true;
    if (this.#isComparing) return;
    this.#isComparing = true;
    while (this.#isStale) {
      this.#isStale = false;
      const reference = this.#reference;
      this.#similarities = reference && (await this.#embeddings.compare(reference.name, reference.token));
    }
    this.#isComparing = false;
    this.#paint();
    this.#tell();
  }

  async #showPooled() {
    const value = await this.#embeddings.pooled(NAMES);
    part("pooled-row").hidden = value === null;
    part("pooled").textContent = value === null ? "" : similarity(value);
  }

  /** All pictures on one scale, which the reference itself, always 1, does not stretch. */
  #paint() {
    part("similarity").hidden = this.#similarities === null;
    if (this.#similarities === null) return;
    const extremes = this.#entries().map(([name, values]) => this.#extremes(name, values));
    const low = Math.min(1, ...extremes.map(({ lowest }) => lowest));
    const high = Math.max(low, ...extremes.map(({ highest }) => highest));
    this.#entries().forEach(([name, values]) => this.#maps.get(name).heat(values, { low, high }));
    part("low").textContent = similarity(low);
    part("high").textContent = similarity(high);
    part("nearest").textContent = extremes
      .filter(({ nearest }) => nearest !== null)
      .map(({ name, nearest, highest }) => `${name}[${nearest}] ${similarity(highest)}`)
      .join(", ");
  }

  /** Markers and words. */
  #tell() {
    clearTimeout(this.#announcement);
    if (this.#similarities === null || this.#reference === null) return; // removed while it was compared
    this.#maps.forEach((map, name) => {
      map.mark("reference", this.#reference.name === name ? this.#reference.token : null);
      map.mark("probe", this.#probe?.name === name ? this.#probe.token : null);
    });
    const reference = this.#place(this.#reference);
    part("reference-term").textContent = this.#isHeld ? "Token held" : "Token";
    part("reference").textContent = reference;
    part("probe-row").hidden = this.#probe === null;
    const probe = this.#probe && `${this.#place(this.#probe)}: ${similarity(this.#similarities[this.#probe.name][this.#probe.token])}`;
    part("probe").textContent = probe ?? "";
    const nearest = part("nearest").textContent;
    const words = probe ?? `${this.#isHeld ? "Held: " : ""}${reference}. Most similar: ${nearest}`;
    this.#announcement = setTimeout(() => this.#announce(words), SILENCE_MS);
  }

  /** Of the pictures that are there, in order: [name, similarities]. */
  #entries() {
    const there = NAMES.filter((name) => this.#maps.has(name) && this.#similarities[name]);
    return there.map((name) => [name, this.#similarities[name]]);
  }

  #extremes(name, values) {
    const own = this.#reference.name === name ? this.#reference.token : null;
    const extremes = { name, nearest: null, lowest: Infinity, highest: -Infinity };
    values.forEach((value, token) => {
      if (token === own) return;
      extremes.lowest = Math.min(extremes.lowest, value);
      if (value > extremes.highest) Object.assign(extremes, { nearest: token, highest: value });
    });
    return extremes;
  }

  /** A token by its row of the embeddings, and where it is in the picture. */
  #place({ name, token }) {
    const { rows, columns } = this.#maps.get(name);
    const [row, column] = [Math.floor(token / columns) + 1, (token % columns) + 1];
    return `${name}[${token}], row ${row} of ${rows}, column ${column} of ${columns}`;
  }
}

const part = (id) => document.getElementById(id);
