// What the browser knows of the service: the history it loaded, and the updates since.

const SAMPLES = 16384;
const STEPS = 2048;
const MOVES = 4096;
const SEGMENTS = 512; // of one lane

export class Model {
  constructor() {
    Object.assign(this, { seq: 0, roster: 0, now: 0, samples: [], steps: [], moves: [], lanes: [], states: [], parts: [] });
    Object.assign(this, { columns: null, head: [], versions: [], trouble: "" });
    this.places = new Map(); // lanes by the worker's name
  }

  load(history) {
    Object.assign(this, history);
    this.lanes = history.lanes.map(([name, host, isPool, segments]) => ({ name, host, isPool, segments }));
    this.places = new Map(this.lanes.map((lane, place) => [lane.name, place]));
    this.now = this.samples.length ? this.samples.at(-1)[0] : Date.now() / 1000;
    this.columns = null;
  }

  // Returns whether the update continues what is known; if not, the history must be loaded again.
  apply(update) {
    this.seq = update.seq;
    if (update.trouble !== undefined) {
      this.trouble = update.trouble;
      return true;
    }
    if (update.roster !== this.roster) return false;
    this.trouble = "";
    this.now = update.now;
    this.head = update.head;
    this.versions = update.versions;
    this.samples.push(update.sample);
    if (this.steps.length && update.steps.length && update.steps[0][0] <= this.steps.at(-1)[0]) this.steps = [];
    this.steps.push(...update.steps);
    this.moves.push(...update.moves);
    this.columns = update.workers;
    const [versions, codes] = update.workers;
    for (let place = 0; place < this.lanes.length; place++) {
      const segments = this.lanes[place].segments;
      const last = segments.at(-1);
      if (!last || last[1] !== versions[place] || last[2] !== codes[place]) {
        segments.push([update.now, versions[place], codes[place]]);
        if (segments.length > SEGMENTS) segments.splice(0, SEGMENTS / 2);
      }
    }
    trim(this.samples, SAMPLES);
    trim(this.steps, STEPS);
    trim(this.moves, MOVES);
    return true;
  }

  // The index of the first sample that is not before `from`.
  firstSample(from) {
    let low = 0;
    let high = this.samples.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.samples[middle][0] < from) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  worker(place) {
    const lane = this.lanes[place];
    const last = lane.segments.at(-1) ?? [0, -1, 0];
    const [version, code, running, waiting, kv, tokens] = this.columns
      ? this.columns.map((column) => column[place])
      : [last[1], last[2], 0, 0, 0, 0];
    return { name: lane.name, host: lane.host, isPool: lane.isPool, version, state: this.states[code], running, waiting, kv, tokens };
  }
}

function trim(list, most) {
  if (list.length > most) list.splice(0, list.length - most + (most >> 3));
}
