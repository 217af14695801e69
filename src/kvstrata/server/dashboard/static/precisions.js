// Names of precisions: which there are, in which order they lie, which colour they have.

export const NAMES = [
  "raw",
  "planes:8", "planes:4", "planes:2",
  "affine:8", "affine:6", "affine:5", "affine:4", "affine:3", "affine:2",
];
export const RUNNING = "running";
export const OTHER = "other";

// Sixteen stands for raw, whatever the model computes in.
export function bits(name) {
  const first = name.split("+")[0];
  return first === "raw" ? 16 : Number(first.split(":")[1]) || 0;
}

export function colour(name) {
  if (name === RUNNING) return "var(--live)";
  const found = bits(name);
  return found === 16 ? "var(--raw)" : [2, 3, 4, 5, 6, 8].includes(found) ? `var(--b${found})` : "var(--other)";
}

// Fewest bits at the bottom, what runs on top.
export function deepestFirst(names) {
  const depth = (name) => (name === RUNNING ? 99 : bits(name));
  return [...names].sort((a, b) => depth(a) - depth(b) || a.localeCompare(b));
}
