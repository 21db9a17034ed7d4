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

// Neighbouring versions differ most: a golden angle apart. `strength`: 1 full, 0.45 pale.
export function versionColour(version, strength = 1) {
  if (version < 0) return colour("none");
  const hue = Math.round((version * 137.508 + 215) % 360);
  return `hsl(${hue} ${isDark ? 58 : 62}% ${isDark ? 56 : 47}% / ${strength})`;
}
