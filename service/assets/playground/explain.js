/** What became of a picture, in words: sentences and facts made of the API's own numbers. Pure. */

import { bytes, count, size } from "./format.js";

/** Pixels of a patch's side, and of a token's, which merges 2 x 2 patches. */
export function patchSide({ grid_thw: [, , columns], padded_size: [width] }) {
  return width / columns;
}

/** For each change between the file's picture and what the encoder sees, [what, how and why]. */
export function changes(geometry, capacity) {
  return [resize(geometry, capacity), padding(geometry)];
}

/** [term, description] of what is worth knowing beside them. */
export function facts({ file, answer, capacity }) {
  const { geometry, dtype, shape, start, end } = answer;
  const [frames, rows, columns] = geometry.grid_thw;
  const side = patchSide(geometry);
  const share = Math.round((100 * geometry.patches) / geometry.tier);
  const itemBytes = (end - start) / (shape[0] * shape[1]);
  return [
    ["Picture", `${size(geometry.original_size)}, ${bytes(file.size)}`],
    ["Patches", `${count(rows)} rows × ${count(columns)} columns = ${count(frames * rows * columns)} of ${side} × ${side} px`],
    ["Tier", `${count(geometry.tier)} patches, ${share}% full (tiers: ${capacity.tiers.map((tier) => count(tier.patches)).join(", ")})`],
    ["Tokens", `${count(geometry.num_tokens)} of ${count(shape[1])} numbers in ${dtype}`],
    ["Memory of the answer", `${bytes(answer.numBytes)}: embeddings ${count(shape[0])} × ${count(shape[1])} × ${itemBytes} B = ${count(end - start)}, the rest tells of them`],
    ["In a prompt", geometry.prompt ?? "not known for this model"],
    ["Request", answer.requestId],
  ];
}

function resize({ original_size: original, encoded_size: encoded, downscaled }, { max_patches_per_image: top }) {
  if (downscaled) {
    const percent = Math.round((100 * Math.max(...encoded)) / Math.max(...original));
    return ["Downscaled", `to ${size(encoded)}, ${percent}% of its sides: it has more patches than the top tier, ${count(top)}, and the policy is to downscale.`];
  }
  if (original.join() !== encoded.join()) {
    return ["Resized", `to ${size(encoded)} by the model's own rule, which bounds pictures whatever the tiers are.`];
  }
  return ["Not resized:", "it is encoded at its own size."];
}

function padding(geometry) {
  const [right, bottom] = geometry.padded_size.map((padded, axis) => padded - geometry.encoded_size[axis]);
  const token = 2 * patchSide(geometry);
  if (right + bottom === 0) return ["Not padded:", `both sides are multiples of a token's ${token} px.`];
  const where = [right && `${right} px on the right`, bottom && `${bottom} px at the bottom`].filter(Boolean).join(" and ");
  return ["Padded", `with ${where} to ${size(geometry.padded_size)}: a token covers ${token} × ${token} px.`];
}
