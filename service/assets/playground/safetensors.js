/** A safetensors answer of /v1/encode for one image: what it says of itself, and its embeddings as float32. Pure. */

const WIDEN = {
  float32: (buffer, start, length) => new Float32Array(buffer, start, length),
  bfloat16: (buffer, start, length) => fromHalves(new Uint16Array(buffer, start, length), (half) => half << 16),
  float16: (buffer, start, length) => {
    const halves = new Uint16Array(buffer, start, length);
    const values = fromHalves(halves, (half) => ((half & 0x8000) << 16) | ((half & 0x7fff) << 13));
    return values.map((value) => value * 2 ** 112); // what the biases of the exponents differ by: 127 - 15
  },
};

/** Values of two bytes as float32, by what they are as bits of one. */
function fromHalves(halves, toBits) {
  const bits = new Uint32Array(halves.length); // and not .from(), which makes a list of objects first
  for (let index = 0; index < halves.length; index += 1) bits[index] = toBits(halves[index]);
  return new Float32Array(bits.buffer);
}

/** `geometry` is the image's entry of `images`; `start` and `end` are the embeddings' bytes in the buffer. */
export function readHeader(buffer) {
  const headerBytes = Number(new DataView(buffer).getBigUint64(0, true));
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 8, headerBytes)));
  const { model, dtype, images } = header.__metadata__;
  const { shape, data_offsets: offsets } = header.embeddings;
  const [start, end] = offsets.map((offset) => 8 + headerBytes + offset);
  return { model, dtype, geometry: JSON.parse(images)[0], shape, start, end };
}

/** The values [num_tokens * hidden] of a dtype, each exactly. */
export function readValues(buffer, { dtype, shape, start }) {
  return WIDEN[dtype](buffer, start, shape[0] * shape[1]);
}
