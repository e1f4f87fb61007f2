/** Numbers as people read them. Pure. */

const whole = new Intl.NumberFormat("en");
const precise = new Intl.NumberFormat("en", { maximumSignificantDigits: 4 });
const UNITS = ["KiB", "MiB", "GiB"];

export const count = (number) => whole.format(number);

export const size = ([width, height]) => `${count(width)} × ${count(height)} px`;

/** Cosine similarities, to four places. */
export const similarity = (value) => value.toFixed(4);

export const milliseconds = (value) => `${value < 10 ? value.toFixed(2) : value < 100 ? value.toFixed(1) : count(Math.round(value))} ms`;

/** Exact bytes, and from 1 KiB on what that is about. */
export function bytes(number) {
  const power = Math.min(UNITS.length, Math.floor(Math.log2(Math.max(1, number)) / 10));
  const exact = `${count(number)} bytes`;
  return power === 0 ? exact : `${exact} (${precise.format(number / 1024 ** power)} ${UNITS[power - 1]})`;
}
