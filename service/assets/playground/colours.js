/** The colour scale of the heat-map: dark to light, and told apart without red and green (matplotlib's viridis). Pure. */

const STOPS = [
  [68, 1, 84],
  [65, 68, 135],
  [42, 120, 142],
  [34, 168, 132],
  [122, 209, 81],
  [253, 231, 37],
];

/** [red, green, blue] for a share between 0 and 1. */
export function colour(share) {
  const place = Math.min(1, Math.max(0, share)) * (STOPS.length - 1);
  const below = Math.min(STOPS.length - 2, Math.floor(place));
  return STOPS[below].map((from, channel) => Math.round(from + (STOPS[below + 1][channel] - from) * (place - below)));
}

/** Paint one pixel for each value, row by row, into a canvas of that many pixels. */
export function paint(canvas, values, low, high) {
  const pixels = new ImageData(canvas.width, canvas.height);
  values.forEach((value, index) => {
    pixels.data.set([...colour(high > low ? (value - low) / (high - low) : 1), 255], index * 4);
  });
  canvas.getContext("2d").putImageData(pixels, 0, 0);
}
