/** Beside the page's own thread: the embeddings of the pictures shown, and their similarities. */

import { readValues } from "./safetensors.js";

const images = new Map(); // name -> { rows: tokens of unit length, one after another; pooled: unit length; hidden }

const calls = {
  add({ name, buffer, header }) {
    images.set(name, normalised(readValues(buffer, header), header.shape[1]));
  },

  remove({ name }) {
    images.delete(name);
  },

  /** Of every token of every picture to one of them: { name: Float32Array }. Null where that picture is gone. */
  compare({ name, token }) {
    const image = images.get(name);
    if (!image) return null;
    const reference = image.rows.subarray(token * image.hidden, (token + 1) * image.hidden);
    return Object.fromEntries([...images].map(([other, { rows }]) => [other, products(rows, reference)]));
  },

  /** Of the mean tokens of two pictures; null where one is missing. */
  pooled({ names }) {
    const [first, second] = names.map((name) => images.get(name)?.pooled);
    return first && second ? products(first, second)[0] : null;
  },
};

onmessage = ({ data: { id, call, values } }) => {
  try {
    postMessage({ id, result: calls[call](values) });
  } catch (error) {
    postMessage({ id, error: error.message });
  }
};

/** `values` [num_tokens * hidden], made of unit length token by token in place, and their mean. */
function normalised(values, hidden) {
  const mean = new Float64Array(hidden);
  for (let start = 0; start < values.length; start += hidden) {
    const row = values.subarray(start, start + hidden);
    for (let index = 0; index < hidden; index += 1) mean[index] += row[index];
    scaleToUnit(row);
  }
  return { rows: values, pooled: scaleToUnit(mean), hidden };
}

function scaleToUnit(row) {
  let squares = 0;
  for (const value of row) squares += value * value;
  const norm = Math.sqrt(squares) || 1;
  for (let index = 0; index < row.length; index += 1) row[index] /= norm;
  return row;
}

/** The inner product of each row with `reference`. */
function products(rows, reference) {
  const hidden = reference.length;
  const result = new Float32Array(rows.length / hidden);
  for (let row = 0; row < result.length; row += 1) {
    const start = row * hidden;
    let sum = 0;
    for (let index = 0; index < hidden; index += 1) sum += rows[start + index] * reference[index];
    result[row] = sum;
  }
  return result;
}
