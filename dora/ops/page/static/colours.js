// Colours of the theme and of versions.

let values = new Map();
let isDark = false;

export function read() {
  values = new Map();
  isDark = getComputedStyle(document.documentElement).getPropertyValue("--is-dark").trim() === "1";
}

export function colour(name) {
  if (!values.has(name)) {
    values.set(name, getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim());
  }
  return values.get(name);
}

// Of a step's parts, in the order of the stack: groups warm, moves and environments between, the trainer blue.
const PARTS = [[22, 78, 46], [36, 88, 52], [50, 85, 58], [0, 0, 62], [285, 45, 56], [172, 60, 40], [330, 62, 58], [0, 0, 80],
  [217, 68, 52], [250, 50, 62], [200, 70, 72]];

export function partColour(part) {
  const [hue, chroma, light] = PARTS[part % PARTS.length];
  return `hsl(${hue} ${chroma}% ${isDark && !chroma ? light - 22 : light}%)`;
}

// Neighbouring versions differ most: a golden section apart, between orange and purple, as red means lost.
export const versionHue = (version) => 40 + ((version * 173.05 + 175) % 280);

// `strength`: 1 full, 0.45 pale.
export function versionColour(version, strength = 1) {
  if (version < 0) return colour("none");
  return `hsl(${Math.round(versionHue(version))} ${isDark ? 58 : 62}% ${isDark ? 56 : 47}% / ${strength})`;
}
